"""The other side of the control socket: asking a daemon."""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from cachefs.control import api
from cachefs.control.api import Route
from cachefs.errors import CachefsError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 2.0

SILENCE_S = 30.0
"""A stream has a line, if only a blank one, every few seconds."""

MAX_REPLY_BYTES = 1 << 24


def ask(
    path: Path,
    route: Route = api.STATUS,
    arguments: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """What the daemon that listens on `path` answers; to `api.STATUS` a `report.StatusReport`.

    Takes no longer than `timeout_s`. Raises `CachefsError` if nobody answers in that time, not
    with a JSON object, or with an error, whose text it then has.
    """
    deadline = time.monotonic() + timeout_s
    reply = bytearray()
    with _explained(path, timeout_s), _opened(path, route, arguments, timeout_s) as response:
        for piece in response.iter_raw():
            reply += piece
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(reply) > MAX_REPLY_BYTES:
                raise CachefsError("the daemon's answer is too long")
    return _parsed(path, bytes(reply))


def stream(
    path: Path,
    route: Route,
    arguments: Mapping[str, object] | None = None,
    silence_s: float = SILENCE_S,
) -> Iterator[dict[str, Any]]:
    """What the daemon answers, object by object, to a route whose answer is a stream. Closing the
    iterator ends what the daemon does for it.

    Raises `CachefsError` as `ask` does, also when the daemon ends in the middle, or is silent for
    `silence_s`.
    """
    with _explained(path, silence_s), _opened(path, route, arguments, silence_s) as response:
        line = b""
        for piece in response.iter_raw():
            *lines, line = (line + piece).split(b"\n")
            yield from (_parsed(path, whole) for whole in lines if whole)
        if line:
            yield _parsed(path, line)


@contextmanager
def _opened(
    path: Path, route: Route, arguments: Mapping[str, object] | None, timeout_s: float
) -> "Iterator[httpx.Response]":
    """The answer, of which only the head has been read."""
    import httpx

    _knock(path, timeout_s)
    given = arguments or {}
    url = f"http://cachefs{route.path}"
    if route.method == "GET" and given:
        url += "?" + urlencode(given, errors="surrogateescape")
    content = json.dumps(given).encode() if route.method == "POST" else None
    # Without `verify=False` it would load all certificates of the system, for nothing.
    transport = httpx.HTTPTransport(uds=str(path), verify=False)
    client = httpx.Client(transport=transport, timeout=timeout_s, trust_env=False)
    with client, client.stream(route.method, url, content=content) as response:
        yield response


def _knock(path: Path, timeout_s: float) -> None:
    """Raises `OSError` if nobody listens: httpx would not say why, and leave its socket open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(str(path))


@contextmanager
def _explained(path: Path, timeout_s: float) -> Iterator[None]:
    """Errors of the connection become `CachefsError`s."""
    import httpx

    try:
        yield
    except (TimeoutError, httpx.TimeoutException):
        raise CachefsError(f"the daemon did not answer on {path} within {timeout_s:g} s") from None
    except httpx.ProtocolError as error:
        raise CachefsError(
            f"the daemon on {path} did not answer as it should ({error}); it has ended, or is of "
            "another version than this command"
        ) from error
    except (FileNotFoundError, ConnectionRefusedError):
        raise CachefsError(f"no daemon listens on {path}") from None
    except (OSError, httpx.TransportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CachefsError(f"can't ask the daemon on {path}: {reason}") from error


def _parsed(path: Path, reply: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(reply)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CachefsError(f"the daemon on {path} did not answer as it should: {reply[:80]!r}")
    if "error" in answer:
        raise CachefsError(str(answer["error"]))
    return answer
