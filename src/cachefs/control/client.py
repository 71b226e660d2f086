"""The other side of the control socket: asking a daemon for its status."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError

TIMEOUT_S = 2.0
MAX_REPLY_BYTES = 1 << 20


def ask(path: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The status from the daemon that listens on `path` (see `report.StatusReport`).

    Takes no longer than `timeout_s`. Raises `CachefsError` if nobody answers in that time, or
    not with a status.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            reply = _read_all(sock, deadline)
    except TimeoutError:
        raise CachefsError(f"the daemon did not answer on {path} within {timeout_s:g} s") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise CachefsError(f"no daemon listens on {path}") from None
    except OSError as error:
        raise CachefsError(f"can't ask the daemon on {path}: {error.strerror}") from error
    try:
        status = json.loads(reply)
    except ValueError as error:
        raise CachefsError(f"the daemon on {path} gave an answer that is no status") from error
    if not isinstance(status, dict) or "error" in status:
        said = status["error"] if isinstance(status, dict) else repr(reply[:80])
        raise CachefsError(f"the daemon on {path} could not tell its status: {said}")
    return status


def _read_all(sock: socket.socket, deadline: float) -> bytes:
    chunks = bytearray()
    while True:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = sock.recv(65536)
        if not chunk:
            return bytes(chunks)
        chunks += chunk
        if len(chunks) > MAX_REPLY_BYTES:
            raise CachefsError("the daemon's answer is too long to be a status")
