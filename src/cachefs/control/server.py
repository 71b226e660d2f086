"""The daemon's side of the control socket.

A client sends one line with one JSON object, `{"verb": "status"}`, with the verb's arguments beside
it; it is answered with one JSON object, `{"error": "one line"}` for a failure, and the connection
is closed. A later version speaks HTTP here; clients are shipped with the daemon, so nobody else
depends on the form.
"""

import json
import logging
import socket as stdlib_socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from cachefs.errors import CachefsError

REQUEST_TIMEOUT_S = 2.0
"""A client that hasn't sent its request within this time is dropped."""

SEND_TIMEOUT_S = 2.0
"""A client that doesn't read for this long is dropped."""

MAX_REQUEST_BYTES = 1 << 16

Handler = Callable[[dict[str, Any]], Awaitable[Mapping[str, object]]]
"""From the arguments of a request to a mapping that JSON can hold. What it raises is told to the
client: the text of a `CachefsError`; anything else is logged too."""

_logger = logging.getLogger(__name__)


async def serve(
    path: Path,
    handlers: Mapping[str, Handler],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer on the Unix socket `path` until cancelled; `handlers` are named by their verbs.

    The socket is made with mode 0600 in the directory that `path` names (itself private), a
    socket left over from a dead daemon is replaced, and it is removed at the end. With
    `nursery.start` this returns once clients can connect. Raises `CachefsError` if another
    process is listening there or it can't be made.
    """
    sock = await _listen(path)
    inode = path.stat().st_ino
    listener = trio.SocketListener(sock)

    async def answer(stream: trio.SocketStream) -> None:
        await _answer(stream, handlers)

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


async def _answer(stream: trio.SocketStream, handlers: Mapping[str, Handler]) -> None:
    async with stream:
        try:
            with trio.move_on_after(REQUEST_TIMEOUT_S) as waiting:
                line = await _receive_line(stream)
            if waiting.cancelled_caught:
                return
            reply = await _reply(line, handlers)
            with trio.move_on_after(SEND_TIMEOUT_S):
                await stream.send_all(reply)
        except trio.BrokenResourceError:
            _logger.debug("a control client left before it was answered")


async def _receive_line(stream: trio.SocketStream) -> bytes:
    """What stands before the first line end, or before the end; too long a line is cut."""
    line = b""
    while b"\n" not in line and len(line) <= MAX_REQUEST_BYTES:
        chunk = await stream.receive_some(MAX_REQUEST_BYTES)
        if not chunk:
            break
        line += chunk
    return line.partition(b"\n")[0]


async def _reply(line: bytes, handlers: Mapping[str, Handler]) -> bytes:
    verb: object = None
    try:
        verb, arguments = _parse(line)
        if verb not in handlers:
            raise CachefsError(
                f'the daemon doesn\'t know "{verb}"; it is of another version than this command'
            )
        reply = json.dumps(await handlers[verb](arguments))
    except CachefsError as error:
        reply = json.dumps({"error": str(error)})
    except Exception as error:
        _logger.exception("the request %r could not be answered", verb)
        reply = json.dumps({"error": f"internal error: {type(error).__name__}: {error}"})
    return reply.encode()


def _parse(line: bytes) -> tuple[str, dict[str, Any]]:
    """Verb and arguments. Raises `CachefsError`."""
    if len(line) > MAX_REQUEST_BYTES:
        raise CachefsError(f"the request is longer than {MAX_REQUEST_BYTES} bytes")
    try:
        arguments = json.loads(line)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not isinstance(arguments.get("verb"), str):
        raise CachefsError('a request is one line of JSON such as {"verb": "status"}')
    return arguments.pop("verb"), arguments
