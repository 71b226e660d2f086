"""The kernel side of a mount: mounting, tuning, and invalidating what the kernel caches."""

import ctypes
import fcntl
import logging
import os
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyfuse3
import trio

from cachefs.errors import MountError, RelayUnusableError
from cachefs.fuse import loop
from cachefs.fuse.kernel_mount import KernelMount, kernel_mount
from cachefs.fuse.notices import NameNotices
from cachefs.fuse.operations import Operations

try:
    from cachefs.fuse.relay import _relay
except ImportError:  # not compiled here
    _relay = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_notices: NameNotices | None = None
"""Takes notices for the kernel while there is a session."""
_notices_fd: int | None = None
"""The socket of the supervisor that takes notices, if it does. libfuse's session owns it."""
_device_fd: int | None = None
"""/dev/fuse of a mount made by the supervisor; None otherwise. This module owns and closes it."""

_operations: Operations | None = None
"""The handlers of a mount that the supervisor has made; None otherwise."""

_own_mount: KernelMount | None = None
"""The mount that this process has made; None otherwise. libfuse's session owns its descriptor."""

_OPTIONS = ("subtype=cachefs", "default_permissions")
_IDLE_TASKS = 16
_MAX_TASKS = 1_000
"""Most requests handled at once. A READ that waits for the origin occupies one task, so there must
be more tasks than readers times their read-ahead. An unused task costs nothing."""
_MAX_BACKGROUND = 1024
_CONGESTION = 960
"""The kernel's defaults are 12 and 9. With 9 read-aheads in flight, the kernel treats the mount as
congested, stops reading ahead and requests single pages: 16 readers of small files sent 2.4 READs
a file. At `max_background`, all readers wait, so `fuse/relay/reads.c` stops each user earlier."""
_USUAL_READS, _FEWEST_READS = 256, 2
"""Bounds of the READs that the daemon handles at once for one user; C code keeps back the rest."""

_NO_INODE = 0
_NOTICES_REACH_S = 10.0
"""How long `names_dropped` waits for a kernel that waits for look-ups, or for a busy machine."""

_CONNECTIONS = Path("/sys/fs/fuse/connections")
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def mount(
    operations: Operations, mountpoint: Path, source: str, allow_other: bool, writable: bool
) -> str:
    """Mount. The kernel enforces permissions. Without `writable`, it refuses writes with EROFS.

    Returns the mount's device ("MAJOR:MINOR") in the mount table. Raises `MountError` when the
    kernel or fusermount3 refuses.
    """
    global _own_mount
    if _relay is not None:
        _relay.reads_ready_fd()
    made = kernel_mount(mountpoint, source, allow_other, writable)
    try:
        pyfuse3.init(operations, f"/dev/fd/{made.fd}", {*_OPTIONS, "rw" if writable else "ro"})
    except RuntimeError as error:
        with suppress(OSError):
            made.detach()
        os.close(made.fd)
        raise MountError(f"can't mount on {mountpoint}: libfuse refuses it: {error}") from error
    _own_mount = made
    _begin_notices()
    return made.device


def connect(operations: Operations, requests_fd: int, device_fd: int, takes_notices: bool) -> None:
    """Serve a mount that the supervisor has made.

    Requests come from `requests_fd`, replies go to `device_fd`. Both descriptors are closed with
    the session. With `takes_notices`, invalidations of names go through `requests_fd`, and the
    supervisor passes them on to the kernel. Raises `RelayUnusableError` if this libfuse can't.
    """
    global _device_fd, _notices_fd, _operations
    if _relay is None:
        raise RelayUnusableError("its compiled part is missing")
    _device_fd = device_fd
    _relay.reads_ready_fd()
    _relay.connect(requests_fd, device_fd, takes_notices)
    try:
        pyfuse3.init(operations, f"/dev/fd/{device_fd}", {*_OPTIONS, "ro"})
    except RuntimeError as error:
        raise RelayUnusableError(f"libfuse refuses it: {error}") from error
    if not _relay.is_connected():
        raise RelayUnusableError("libfuse was loaded in another way than the relay expects")
    _notices_fd = requests_fd if takes_notices else None
    _operations = operations
    _begin_notices()


def _begin_notices() -> None:
    global _notices
    _notices = NameNotices(pyfuse3.invalidate_entry)


async def serve() -> None:
    """Answer requests until the mount ends."""
    take_read = None if _operations is None else partial(_take_read, _operations)
    wake = loop.install(take_read)
    async with trio.open_nursery() as nursery:
        if _relay is not None:
            nursery.start_soon(_wake_for_deferred, _relay.reads_ready_fd(), wake)
        await pyfuse3.main(min_tasks=_IDLE_TASKS, max_tasks=_MAX_TASKS)
        nursery.cancel_scope.cancel()


def _take_read(operations: Operations) -> bool | None:
    """Take the next request if it is a READ that needs no task: see `loop.TakeRead`."""
    found = _relay.next_read()
    if found is None:
        return None
    if isinstance(found, bool):
        return False
    unique, handle, offset, size, request = found

    def end(is_answered: bool) -> None:
        if is_answered:
            _relay.read_answered(unique)
        else:
            _relay.return_read(request)

    assert _device_fd is not None
    if not operations.reply(handle, offset, size, _device_fd, unique, end):
        return False
    _relay.take_read()
    return True


async def _wake_for_deferred(ready_fd: int, wake: Callable[[], None]) -> None:
    """Wake the loop whenever a deferred READ is due (`fuse/relay/reads.h`)."""
    while True:
        await trio.lowlevel.wait_readable(ready_fd)
        wake()
        await trio.lowlevel.checkpoint()


def bound_reads(user: int, bytes_per_s: int) -> None:
    """Bound the READs that the daemon handles at once for a user number.

    `bytes_per_s` is the user's limit, 0 for none. The bound is one second's worth of 1 MiB READs,
    between `_FEWEST_READS` and `_USUAL_READS`.
    """
    if _relay is not None:
        _relay.reads_ready_fd()
        most = min(_USUAL_READS, max(_FEWEST_READS, bytes_per_s >> 20))
        _relay.bound_reads(user, most if bytes_per_s else 0, bytes_per_s > 0)


def accept_writes() -> None:
    """Negotiate a writable mount with the kernel. Call this before `mount` or `connect`. Raises
    `MountError` where the compiled part is missing."""
    if _relay is None:
        raise MountError("a writable mount needs cachefs's compiled part, which is missing here")
    _relay.accept_writes()


def pass_through() -> None:
    """Negotiate with the kernel that it may read whole files directly. Call this before `connect`,
    and not for a writable mount."""
    if _relay is not None:
        _relay.pass_through()


def request_process() -> int:
    """Return the process that sent the request which is being handled; 0 if it is not known. Call
    this in a handler of a writable mount, before the first await."""
    assert _relay is not None  # see `accept_writes`
    return _relay.request_process()


def request_sender() -> tuple[int, int, int]:
    """Return user, group and thread that sent the request which is being handled; the thread is 0
    if it is not known. Call this as `request_process`."""
    assert _relay is not None  # see `accept_writes`
    return _relay.request_caller()


def stop() -> None:
    """Make `serve` return."""
    pyfuse3.terminate()


def unmount() -> None:
    """Free the session, and unmount, lazily if the mount is in use.

    A mount that the supervisor has made stays mounted. Blocks until the last notices are sent.
    """
    global _device_fd, _notices, _notices_fd, _operations, _own_mount
    if _notices is not None:
        _notices.finish()  # they use the session
        _notices = None
    _notices_fd = _operations = None
    if _own_mount is not None:
        try:
            _own_mount.detach()
        except OSError as error:
            log.error("can't unmount %s: %s", _own_mount.mountpoint, error.strerror)
        _own_mount = None
    pyfuse3.close(unmount=False)
    if _device_fd is not None:
        os.close(_device_fd)
        _device_fd = None


def invalidate_entry(parent: int, name: bytes) -> None:
    """Make the kernel drop a cached name. Returns at once. Unknown names are no error. Does nothing
    before the mount, when the kernel has no names, and after its end."""
    if _notices is not None:
        _notices.put(parent, name)


async def names_dropped() -> None:
    """Wait until the kernel has dropped the names of all earlier `invalidate_entry`; at most
    `_NOTICES_REACH_S`."""
    with trio.move_on_after(_NOTICES_REACH_S):
        # The supervisor writes one notice to the kernel before it takes the next from the socket.
        # So if it has taken this one, which changes nothing, it has written those before.
        invalidate_entry(_NO_INODE, b".")
        if _notices is not None:
            await _notices.sent()
        while _notices_fd is not None and _unread_bytes(_notices_fd):  # noqa: ASYNC110
            await trio.sleep(0.001)


def _unread_bytes(socket_fd: int) -> int:
    """Return the memory of messages that the other end has not taken yet (SIOCOUTQ, unix(7))."""
    answer = fcntl.ioctl(socket_fd, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def invalidate_attributes(ino: int) -> None:
    """Make the kernel drop an inode's cached attributes. Unknown inodes are no error."""
    with suppress(OSError):
        pyfuse3.invalidate_inode(ino, attr_only=True)


def tune(device: str, kernel_readahead_bytes: int) -> None:
    """Set the kernel's read-ahead and raise its request limits for a mount, as far as possible.

    `device` is the mount's "MAJOR:MINOR". Only root can do this; failures go to the debug log.
    Blocks.
    """
    _write_setting(Path(f"/sys/class/bdi/{device}/read_ahead_kb"), kernel_readahead_bytes >> 10)
    connection = _CONNECTIONS / device.partition(":")[2]
    settings = {
        "max_background": _MAX_BACKGROUND,
        "congestion_threshold": _CONGESTION,
    }
    if os.geteuid() == 0 and not os.path.ismount(_CONNECTIONS):
        _set_unseen(connection, settings)
        return
    for name, value in settings.items():
        _write_setting(connection / name, value)


def _set_unseen(connection: Path, settings: dict[str, int]) -> None:
    """Write the settings where /sys/fs/fuse/connections is not mounted. (systemd mounts it.)

    A thread mounts it in a mount namespace of its own. The namespace ends with the thread, so
    nothing is left even if this process dies. Programs for this took 30 ms of each start.
    """

    def write() -> None:
        try:
            _be_alone()
            _checked(_libc.mount(b"fusectl", bytes(_CONNECTIONS), b"fusectl", 0, None))
        except OSError as error:
            log.debug("can't tune %s: %s", connection, error)
            return
        for name, value in settings.items():
            _write_setting(connection / name, value)

    thread = threading.Thread(target=write, name="cachefs-tune")
    thread.start()
    thread.join()


def _be_alone() -> None:
    """Give this thread its own mount namespace, from which no mount gets out. Raises `OSError`."""
    _checked(_libc.unshare(_CLONE_NEWNS))
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))


def _checked(result: int) -> None:
    """Raise `OSError` if a call of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write_setting(file: Path, value: int) -> None:
    try:
        file.write_text(str(value))
    except OSError as error:
        log.debug("can't tune %s: %s", file, error)
