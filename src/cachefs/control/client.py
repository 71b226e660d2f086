"""The client's side of the control socket: sends requests to a daemon.

It uses the standard library's client, because importing httpx takes more time than everything else
that a command such as `cachefs status` does.
"""

import http.client
import json
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cachefs.control import api
from cachefs.control.api import Route
from cachefs.errors import CachefsError
from cachefs.mounts.peer import is_trusted, uid_of_peer
from cachefs.mounts.runtime import read_entry

TIMEOUT_S = 2.0

SILENCE_S = 30.0
"""How long a client waits for a stream's next line. The daemon sends at least a blank line every
few seconds."""

_LOOK_S = 0.05

MAX_REPLY_BYTES = 1 << 24
_PIECE_BYTES = 1 << 16


def ask(
    path: Path,
    route: Route = api.STATUS,
    arguments: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the answer of the daemon that listens on `path`; for `api.STATUS` this is a
    `report.StatusReport`.

    Takes at most `timeout_s`. Within this time it also waits for a daemon that a supervisor is
    starting. Raises `CachefsError` if no daemon answers in this time, if the answer is no JSON
    object, or if the answer is an error (with its text).
    """
    deadline = time.monotonic() + timeout_s
    reply = bytearray()
    with _explained(path, timeout_s), _opened(path, route, arguments, timeout_s) as (sock, answer):
        while piece := answer.read1(_PIECE_BYTES):
            reply += piece
            if len(reply) > MAX_REPLY_BYTES:
                raise CachefsError("the daemon's answer is too long")
            if answer.isclosed():
                break  # Python 3.13 closes it, and the socket, with the last byte
            sock.settimeout(max(0.001, deadline - time.monotonic()))
    return _parsed(path, bytes(reply))


def stream(
    path: Path,
    route: Route,
    arguments: Mapping[str, object] | None = None,
    silence_s: float = SILENCE_S,
) -> Generator[dict[str, Any], None, None]:
    """Yield the answer to a route that answers with a stream, object by object. Closing the
    iterator ends the daemon's work for it.

    Raises `CachefsError` as `ask` does, also if the daemon ends before the stream does, or sends
    nothing for `silence_s`.
    """
    with _explained(path, silence_s), _opened(path, route, arguments, silence_s) as (_, answer):
        line = b""
        while piece := answer.read1(_PIECE_BYTES):
            *lines, line = (line + piece).split(b"\n")
            yield from (_parsed(path, whole) for whole in lines if whole)
        if line:
            yield _parsed(path, line)


@contextmanager
def _opened(
    path: Path, route: Route, arguments: Mapping[str, object] | None, timeout_s: float
) -> Iterator[tuple[socket.socket, http.client.HTTPResponse]]:
    """Send the request. Return the connection, and the answer with only its head read."""
    given = arguments or {}
    target, body = route.path, None
    if route.method == "POST":
        body = json.dumps(given).encode()
    elif given:
        target += "?" + urlencode(given, errors="surrogateescape")
    connection = http.client.HTTPConnection("cachefs")
    with _connected(path, timeout_s) as sock:
        connection.sock = sock
        # A daemon that doesn't know the route answers and closes before it reads the body.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(route.method, target, body, {"Connection": "close"})
        with connection.getresponse() as answer:
            yield sock, answer


def _connected(path: Path, timeout_s: float) -> socket.socket:
    """Return a connected socket. Waits up to `timeout_s` for a daemon that a supervisor is
    starting. Raises `OSError`."""
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            if not is_trusted(uid := uid_of_peer(sock)):
                raise CachefsError(
                    f"uid {uid} listens on {path}, and not a daemon of this user: remove the socket"
                )
            return sock
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() + _LOOK_S > deadline or not _comes_another(path):
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(_LOOK_S)


def _comes_another(path: Path) -> bool:
    """Return whether a supervisor will start a new daemon for this mount."""
    entry = read_entry(path.with_suffix(".json"))
    return entry is not None and entry.alive and entry.supervised


@contextmanager
def _explained(path: Path, timeout_s: float) -> Iterator[None]:
    """Convert errors of the connection to `CachefsError`s."""
    try:
        yield
    except TimeoutError:
        raise CachefsError(f"the daemon did not answer on {path} within {timeout_s:g} s") from None
    except http.client.HTTPException as error:
        what = str(error) or type(error).__name__
        raise CachefsError(
            f"the daemon on {path} did not answer as it should ({what}); it has ended, or is of "
            "another version than this command"
        ) from error
    except (FileNotFoundError, ConnectionRefusedError):
        raise CachefsError(f"no daemon listens on {path}") from None
    except OSError as error:
        raise CachefsError(f"can't ask the daemon on {path}: {error.strerror or error}") from error


def _parsed(path: Path, reply: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise CachefsError(f"the daemon on {path} did not answer as it should: {reply[:80]!r}")
    if "error" in answer:
        raise CachefsError(str(answer["error"]))
    return answer
