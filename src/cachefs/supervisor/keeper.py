"""The keeper: a small process that holds mounts while no supervisor serves them.

A mount ends when the last process closes its /dev/fuse. In a container, all processes of a mount
end together when the container is replaced. The keeper runs elsewhere, has a copy of the
descriptor, and gives it to the next supervisor (`keeper_link.py` has the messages). Until then,
all requests wait in the kernel.

The keeper does not answer requests and does not look at the descriptor while a supervisor serves
the mount. It has one thread. Its clients are processes of the same user, or of root.
"""

import base64
import logging
import os
import select
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cachefs.errors import CachefsError, UsageError, reason_of
from cachefs.mounts import cachefs_mounts, unmount
from cachefs.mounts.peer import is_trusted, uid_of_peer
from cachefs.supervisor.channel import Channel, Message
from cachefs.supervisor.keeper_link import decoded_init
from cachefs.supervisor.signals import read_signals, signals_on_a_socket
from cachefs.trusted_path import opened_parent

_MOST_CLIENTS = 256
_LONGEST_TEXT = 4096
_LOOK_S = 1.0
_LONGEST_SOCKET_PATH = 107
"""The limit of Linux for the path of a Unix socket, see unix(7)."""
_FUSE_DEVICE = os.makedev(10, 229)
"""The number of /dev/fuse, see Documentation/admin-guide/devices.txt of Linux."""

_logger = logging.getLogger(__name__)


@dataclass
class _KeptMount:
    """A mount that the keeper has a descriptor of. It owns `fd`.

    `client` serves the mount now; None while it waits, until `until_s` (monotonic). `resends` says
    whether the kernel can send unanswered requests again, and `was_left` whether the client has
    seen to it that there are none.
    """

    mountpoint: str
    view: str
    device: str
    init: bytes
    fd: int
    resends: bool
    client: Channel | None
    until_s: float = 0.0
    was_left: bool = False

    def has_ended(self) -> bool:
        """Return whether the kernel has ended the mount: unmounted, and no longer used."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

    def unmount(self) -> None:
        """Unmount lazily wherever it is visible, unless it has ended: another mount may have its
        device number then."""
        if self.has_ended():
            return
        for mount in cachefs_mounts():
            if mount.device == self.device:
                try:
                    unmount(mount.mountpoint, lazy=True)
                except OSError as error:
                    _logger.error("can't unmount %s: %s", mount.mountpoint, reason_of(error))


class Keeper:
    """The keeper of all mounts whose supervisors use its socket."""

    def __init__(self, path: Path, wait_s: float) -> None:
        """Listen at `path`. A mount waits for `wait_s` seconds for its next supervisor.

        Raises `CachefsError` if another keeper listens there, or the socket can't be made.
        """
        self._path = path
        self._wait_s = wait_s
        self._selector = selectors.DefaultSelector()
        self._mounts: dict[str, _KeptMount] = {}
        self._clients: set[Channel] = set()
        self._listener = _listen(path)
        self._watch(self._listener.fileno(), self._accept)

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Keep mounts until SIGTERM or SIGINT. Then unmount those that nobody serves."""
        with signals_on_a_socket((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) as signals:
            ending: list[signal.Signals] = []
            self._watch(signals.fileno(), lambda: ending.extend(read_signals(signals)))
            on_ready()
            try:
                while not {signal.SIGTERM, signal.SIGINT} & set(ending):
                    self._turn()
            finally:
                self._close()

    def _turn(self) -> None:
        waiting = any(mount.client is None for mount in self._mounts.values())
        for key, _ in self._selector.select(_LOOK_S if waiting else None):
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now_s = time.monotonic()
        for mount in list(self._mounts.values()):
            if mount.client is None and mount.has_ended():
                _logger.info("%s was unmounted", mount.mountpoint)
                self._remove(mount)
            elif mount.client is None and now_s >= mount.until_s:
                _logger.warning(
                    "nobody has served %s for %.0f s; it is unmounted",
                    mount.mountpoint,
                    self._wait_s,
                )
                mount.unmount()
                self._remove(mount)

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _close(self) -> None:
        for mount in list(self._mounts.values()):
            if mount.client is None:
                mount.unmount()
            self._remove(mount)
        for client in self._clients:
            client.close()
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    # -- clients ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._clients) >= _MOST_CLIENTS or not is_trusted(uid_of_peer(connection)):
            connection.close()
            return
        connection.setblocking(False)
        client = Channel(connection)
        self._clients.add(client)
        self._watch(client.fileno(), partial(self._receive, client))

    def _receive(self, client: Channel) -> None:
        """Handle one message of a client, or its end."""
        try:
            received = client.receive()
        except BlockingIOError:
            return
        except (ValueError, RecursionError):
            self._lose(client, "it sent no JSON")
            return
        if received is None:
            self._lose(client)
            return
        message, fds = received
        try:
            self._understand(client, message, fds)
        except (ValueError, OSError) as error:
            client.send({"error": f"the keeper refuses that: {error}"}, wait=False)
            self._lose(client, str(error))
        finally:
            for fd in fds:
                os.close(fd)

    def _understand(self, client: Channel, message: Message, fds: list[int]) -> None:
        """Handle one message. Descriptors that are kept are removed from `fds`. Raises
        `ValueError` or `OSError` for a wrong one."""
        if not isinstance(message, dict):
            raise ValueError("it is no object")
        match message:
            case {"take": dict(wanted)}:
                self._take(client, _text(wanted, "mountpoint"), _text(wanted, "view"))
            case {"keep": dict(kept)}:
                self._keep(client, kept, fds)
            case {"leave": _}:
                self._let_leave(client)
            case {"forget": _}:
                for mount in self._served_by(client):
                    self._remove(mount)
            case {"drop": _}:
                for mount in self._served_by(client):
                    mount.unmount()
                    self._remove(mount)

    def _let_leave(self, client: Channel) -> None:
        mounts = self._served_by(client)
        for mount in mounts:
            mount.was_left = True
        text = "the keeper has no mount of this process"
        client.send({"left": True} if mounts else {"error": text}, wait=False)

    def _take(self, client: Channel, mountpoint: str, view: str) -> None:
        mount = self._mounts.get(mountpoint)
        if mount is not None and mount.client is not None:
            client.send({"busy": True}, wait=False)
            return
        reason = None
        if mount is not None and mount.has_ended():
            self._remove(mount)
        elif mount is not None and mount.view != view:
            reason = (
                "the source, --rw, --allow-other or the first cache directory is another one than "
                "before"
            )
            mount.unmount()
            self._remove(mount)
        elif mount is not None:
            mount.client, mount.was_left = client, False
            init = base64.b64encode(mount.init).decode()
            client.send({"taken": {"device": mount.device, "init": init}}, [mount.fd], wait=False)
            return
        client.send({"nothing": reason}, wait=False)

    def _keep(self, client: Channel, kept: Message, fds: list[int]) -> None:
        if len(fds) != 1 or not _is_fuse(fds[0]):
            raise ValueError("that is no /dev/fuse")
        mountpoint = _text(kept, "mountpoint")
        if not mountpoint.startswith("/"):
            raise ValueError("the mountpoint is not absolute")
        view, device = _text(kept, "view"), _text(kept, "device")
        init = decoded_init(_text(kept, "init"))
        before = self._mounts.get(mountpoint)
        if before is not None and before.client not in {None, client}:
            raise ValueError(f"another process serves {mountpoint}")
        if before is not None:
            self._remove(before)
        resends = kept.get("resends") is True
        self._mounts[mountpoint] = _KeptMount(
            mountpoint, view, device, init, fds.pop(), resends, client
        )
        _logger.info("%s is kept", mountpoint)

    def _served_by(self, client: Channel) -> list[_KeptMount]:
        return [mount for mount in self._mounts.values() if mount.client is client]

    def _lose(self, client: Channel, why: str | None = None) -> None:
        """Handle the end of a connection. The mount waits for the next supervisor."""
        if why is not None:
            _logger.warning("a client is refused: %s", why)
        self._selector.unregister(client.fileno())
        self._clients.discard(client)
        client.close()
        for mount in self._served_by(client):
            mount.client = None
            if not (mount.resends or mount.was_left):
                _logger.warning(
                    "%s is unmounted: its process was killed, and this kernel can't send its "
                    "requests again (Linux 6.9 can)",
                    mount.mountpoint,
                )
                mount.unmount()
                self._remove(mount)
                continue
            # A supervisor that never served it does not make it wait longer.
            mount.until_s = mount.until_s or time.monotonic() + self._wait_s
            _logger.info("%s waits for its next supervisor", mount.mountpoint)

    def _remove(self, mount: _KeptMount) -> None:
        os.close(mount.fd)
        del self._mounts[mount.mountpoint]


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, for this user only. Raises `CachefsError`."""
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise UsageError(
            f"--socket {path} has more than {_LONGEST_SOCKET_PATH} bytes; choose a shorter path"
        )
    try:
        with opened_parent(path, strict=True):
            pass  # where others may replace the socket, they could answer for the keeper
    except OSError as error:
        raise CachefsError(f"can't listen at {path}: {reason_of(error)}") from error
    if _answers(path):
        raise CachefsError(f"another keeper listens at {path}; one is enough for a node")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise CachefsError(f"{path} is there and is no socket; name another with --socket")
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise CachefsError(f"can't listen at {path}: {reason_of(error)}") from error
    except CachefsError:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _is_fuse(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == _FUSE_DEVICE


def _text(fields: Message, name: str) -> str:
    """Return a text of a message. Raises `ValueError` if it is none, or too long."""
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 2 * _LONGEST_TEXT or "\0" in value:
        raise ValueError(f"{name} is no text of at most {2 * _LONGEST_TEXT} characters")
    return value
