"""The other side of the control socket: asking a daemon."""

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError

TIMEOUT_S = 2.0
MAX_REPLY_BYTES = 1 << 20


def ask(
    path: Path,
    verb: str = "status",
    arguments: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """What the daemon that listens on `path` answers to `verb`; to "status" a
    `report.StatusReport`.

    Takes no longer than `timeout_s`. Raises `CachefsError` if nobody answers in that time, not
    with a JSON object, or with an error, whose text it then has.
    """
    deadline = time.monotonic() + timeout_s
    request = json.dumps({**(arguments or {}), "verb": verb}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            sock.sendall(request)
            reply = _read_all(sock, deadline)
    except TimeoutError:
        raise CachefsError(f"the daemon did not answer on {path} within {timeout_s:g} s") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise CachefsError(f"no daemon listens on {path}") from None
    except OSError as error:
        raise CachefsError(f"can't ask the daemon on {path}: {error.strerror}") from error
    try:
        answer = json.loads(reply)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CachefsError(f"the daemon on {path} did not answer as it should: {reply[:80]!r}")
    if "error" in answer:
        raise CachefsError(str(answer["error"]))
    return answer


def _read_all(sock: socket.socket, deadline: float) -> bytes:
    chunks = bytearray()
    while True:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = sock.recv(65536)
        if not chunk:
            return bytes(chunks)
        chunks += chunk
        if len(chunks) > MAX_REPLY_BYTES:
            raise CachefsError("the daemon's answer is too long")
