"""The two servers of a mount. Clients can connect before the code of the servers is loaded.

That code (starlette, hypercorn, prometheus_client) takes a third of all imports, and the first
readers should not wait for it. It is loaded for the first client, or soon after the start: later,
an upgrade may have replaced its files.
"""

import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from cachefs.config import OFF, MountConfig, join_address, split_address
from cachefs.control.api import Handler, Route
from cachefs.control.mount_state import MountState
from cachefs.errors import CachefsError

LOAD_AFTER_S = 2.0
"""The code of the servers is loaded after this time, if no client has come before."""

_LISTENS = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""

_NO_HANDLERS: Mapping[Route, Handler] = {}

_loader = trio.CapacityLimiter(1)
"""One thread of its own, whatever the others wait for. Two threads that import the same modules at
the same time may find them half ready."""

log = logging.getLogger(__name__)


async def serve_commands(
    path: Path,
    handlers: Mapping[Route, Handler],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer on the Unix socket `path` until cancelled.

    Creates the socket with mode 0600, in a directory that is itself private; replaces a socket
    left by a dead daemon; removes the socket at the end. Answers only root and our own user. With
    `nursery.start`, this reports started when clients can connect. Raises `CachefsError` if another
    process is listening on `path`, or if the socket can't be created.
    """
    sock = await _listen_for_commands(path)
    inode = path.stat().st_ino
    try:
        task_status.started()
        application, serve_http = await _loaded(sock, _load_commands)
        await serve_http(application(handlers), trio.SocketListener(sock))
    finally:
        sock.close()
        _remove(path, inode)


async def serve_metrics(
    state: MountState,
    handlers: Mapping[Route, Handler] = _NO_HANDLERS,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled, on the configured address; sets `state.metrics_address`. `handlers`
    are those of the control socket; the console uses some of them.

    If the default port is taken (by an earlier mount), this uses another port, so that the mount
    doesn't fail. Raises `CachefsError` if it can't listen on an address set in the configuration.
    """
    listening = await trio.to_thread.run_sync(_listen_for_metrics, state.config)
    if listening is None:
        task_status.started()
        return
    state.metrics_address = join_address(*listening.getsockname()[:2])
    sock = trio.socket.from_stdlib_socket(listening)
    try:
        task_status.started()
        application, serve_http = await _loaded(sock, _load_metrics)
        app = application(state, handlers)
        await serve_http(app, trio.SocketListener(sock), makes_room=True)
    finally:
        sock.close()
        state.metrics_address = None


async def _loaded(sock: trio.socket.SocketType, load: Callable[[], Any]) -> Any:
    """Return the result of `load`, called in a thread when a client connects, or soon."""
    with trio.move_on_after(LOAD_AFTER_S):
        await trio.lowlevel.wait_readable(sock)
    return await trio.to_thread.run_sync(load, limiter=_loader, abandon_on_cancel=True)


def _load_commands() -> Any:
    from cachefs.control.http import serve_http
    from cachefs.control.server import application

    return application, serve_http


def _load_metrics() -> Any:
    from cachefs.control.http import serve_http
    from cachefs.control.metrics_server import application

    return application, serve_http


async def _listen_for_commands(path: Path) -> trio.socket.SocketType:
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0 and path.parent.stat().st_mode & 0o077:
            path.parent.chmod(0o700)  # the kubelet creates the directory of a volume with 755
        if path.is_socket():
            _remove_stale(path)
        await sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise CachefsError(f"can't listen on {path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket without a listening process. Raises `CachefsError` if a process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
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


def _listen_for_metrics(config: MountConfig) -> socket.socket | None:
    """Return a listening socket; None if metrics are off, or the default address can't be used.
    Blocks while it resolves the host's name. Raises `CachefsError`."""
    if config.metrics == OFF:
        return None
    host, port = split_address(config.metrics)
    try:
        return _bound(host, port)
    except OSError as error:
        reason = _why(error)
        if error.errno == errno.EADDRINUSE and listener_uid(port) not in (os.geteuid(), None):
            reason += f", by a process of uid {listener_uid(port)}"
        if "metrics" in config.given:
            raise CachefsError(
                f"can't listen on {config.metrics} for metrics: {reason}; choose another address "
                "with --metrics"
            ) from error
    try:
        sock = _bound(host, 0)
    except OSError as error:
        log.info("no metrics are served: can't listen on %s: %s", host, _why(error))
        return None
    found = join_address(*sock.getsockname()[:2])
    told = "metrics are on %s: can't listen on %s: %s", found, config.metrics, reason
    if listener_uid(port) in (os.geteuid(), None):  # an earlier mount, probably
        log.info(*told)
    else:
        log.warning(*told)
    return sock


def listener_uid(port: int) -> int | None:
    """Return the uid of the process that listens on a TCP port of this machine; None if unknown.
    See proc_net_tcp in the kernel's documentation."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table) as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == _LISTENS and fields[1].endswith(f":{port:04X}"):
                    return int(fields[7])
    return None


def _why(error: OSError) -> str:
    # The text of errors from `create_server` repeats the address, so use the text of the errno.
    # Errors of name look-ups (`gaierror`) have other numbers.
    if error.errno is None or isinstance(error, socket.gaierror):
        return str(error.strerror or error)
    return os.strerror(error.errno)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)
