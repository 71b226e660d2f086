"""The daemon's side of the control socket.

Every connection is answered with one JSON object, the status, and closed. A later version
speaks HTTP here; clients are shipped with the daemon, so nobody else depends on the form.
"""

import json
import logging
import socket as stdlib_socket
from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from cachefs.errors import CachefsError

SEND_TIMEOUT_S = 2.0
"""A client that doesn't read for this long is dropped."""

_logger = logging.getLogger(__name__)


async def serve(
    path: Path,
    handler: Callable[[], Mapping[str, object]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer on the Unix socket `path` until cancelled; `handler` is called per connection.

    The socket is made with mode 0600 in the directory that `path` names (itself private), a
    socket left over from a dead daemon is replaced, and it is removed at the end. With
    `nursery.start` this returns once clients can connect. Raises `CachefsError` if another
    process is listening there or it can't be made.
    """
    sock = await _listen(path)
    inode = path.stat().st_ino
    listener = trio.SocketListener(sock)

    async def answer(stream: trio.SocketStream) -> None:
        await _answer(stream, handler)

    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, answer, [listener])
            task_status.started()
    finally:
        sock.close()
        _remove(path, inode)


async def _listen(path: Path) -> trio.socket.SocketType:
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_stale(path)
        await sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(16)
    except OSError as error:
        sock.close()
        raise CachefsError(f"can't listen on {path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises `CachefsError` if somebody does."""
    with stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise CachefsError(f"another process is listening on {path}")


def _remove(path: Path, inode: int) -> None:
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        pass


async def _answer(stream: trio.SocketStream, handler: Callable[[], Mapping[str, object]]) -> None:
    try:
        reply = json.dumps(handler())
    except Exception as error:
        _logger.exception("the status could not be told")
        reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
    with trio.move_on_after(SEND_TIMEOUT_S):
        async with stream:
            try:
                await stream.send_all(reply.encode())
            except trio.BrokenResourceError:
                _logger.debug("a control client left before it was answered")
