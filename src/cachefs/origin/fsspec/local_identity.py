"""The identity with which a worker thread uses a local source: the kernel then decides.

Linux keeps the user, the groups and the capabilities of each thread apart (credentials(7)). The
functions of the C library for groups change all threads, so this module calls the system call.
`setfsuid` and `setfsgid` are about files only: no other user may send the thread a signal.

A thread that acts for a caller has none of the capabilities that pass over permissions and quotas,
unless the caller has them. Its umask is 0: the kernel has applied the caller's umask already, and
an access list of a directory replaces it.
"""

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cachefs.errors import AccessDeniedError
from cachefs.types import Caller

FILE_CAPABILITIES = sum(1 << number for number in (0, 1, 2, 3, 4, 9, 24, 27, 32))
"""CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, LINUX_IMMUTABLE, SYS_RESOURCE (it passes
over disk quotas), MKNOD, MAC_OVERRIDE (linux/capability.h)."""

_GIVING = 1 << 0 | 1 << 3
"""CHOWN and FOWNER, with which a new version gets the owner and the mode of the old one."""

_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
"""The numbers of setgroups(2) by architecture (asm/unistd.h)."""
_CLONE_FS = 0x200
_VERSION_3 = 0x20080522
_NOBODY = 65534
_NO_ID = ctypes.c_uint32(0xFFFFFFFF)
_HALF = 0xFFFFFFFF

_libc = ctypes.PyDLL(None)
"""It keeps the interpreter lock, as all calls here return at once. To get the lock again would take
longer than the calls."""


class _Head(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    """The sets of capget(2), each divided into its lower and upper 32 bits."""

    _fields_ = tuple(
        (f"{name}_{half}", ctypes.c_uint32)
        for half in ("low", "high")
        for name in ("effective", "permitted", "inheritable")
    )


class _Own(NamedTuple):
    """What a thread is when it acts for nobody."""

    groups: list[int]
    sets: _Sets
    umask: int


class _Thread(threading.local):
    """For whom this thread acts, and what it is otherwise."""

    acting: tuple[Caller, _Own] | None = None
    own: _Own | None = None
    is_unshared: bool | None = None


_this_thread = _Thread()


@contextlib.contextmanager
def acting_as(caller: Caller | None) -> Iterator[None]:
    """Use files with the identity of `caller` in this thread; None leaves it as it is. Raises
    `AccessDeniedError` if that is not possible."""
    if caller is None or _is_own(caller):
        yield
        return
    own = _this_thread.own
    if own is None:
        own = _this_thread.own = _Own(os.getgroups(), _sets(), _own_umask())
    _take(caller, own)
    _this_thread.acting = caller, own
    try:
        yield
    finally:
        _this_thread.acting = None
        _give_back(own)


@contextlib.contextmanager
def acting_as_daemon() -> Iterator[None]:
    """Use files with the daemon's own identity again, inside `acting_as`."""
    acting = _this_thread.acting
    if acting is None:
        yield
        return
    caller, own = acting
    _this_thread.acting = None
    _give_back(own)
    try:
        yield
    finally:
        _take(caller, own)
        _this_thread.acting = acting


def acts_for() -> Caller | None:
    """Return for whom this thread acts; None if it has the daemon's own identity."""
    acting = _this_thread.acting
    return None if acting is None else acting[0]


def _is_own(caller: Caller) -> bool:
    """Whether the daemon's own identity does for this caller. Raises `AccessDeniedError` for other
    users of a daemon that root has not started. Root may do there what the daemon may."""
    own = os.geteuid()
    if own != 0 and caller.uid not in (0, own):
        raise AccessDeniedError(
            f"this mount belongs to uid {own}, and can't act for uid {caller.uid}: mount it as root"
        )
    has_all = caller.capabilities & FILE_CAPABILITIES == FILE_CAPABILITIES
    is_root = caller.uid == 0 and caller.gid == os.getegid()
    return own != 0 or (is_root and has_all)


@contextlib.contextmanager
def working_in(directory: int) -> Iterator[str]:
    """Yield what to write before a name of the open directory `directory` to get its path: nothing,
    if this thread can have a working directory of its own. That is faster."""
    if not _is_unshared():
        yield f"/proc/self/fd/{directory}/"
        return
    os.fchdir(directory)
    try:
        yield ""
    finally:
        os.chdir("/")  # it must not keep a file system from being unmounted


def can_act() -> bool:
    """Return whether this process can act for any user, and give files to any. Blocks for a
    moment."""
    if _GIVING & ~_sets().effective_low:
        return False
    found = []

    def act() -> None:
        with contextlib.suppress(AccessDeniedError), acting_as(Caller(_NOBODY, _NOBODY)):
            found.append(True)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return bool(found)


def _take(caller: Caller, own: _Own) -> None:
    """Take the caller's identity. If that fails, the thread has its own."""
    try:
        if not _set_groups(caller.groups):
            raise AccessDeniedError("this mount can't act for other users: it lacks CAP_SETGID")
        if not _set_ids(caller.uid, caller.gid):
            raise AccessDeniedError("this mount can't act for other users: it lacks CAP_SETUID")
        acting, keeps = _Sets.from_buffer_copy(own.sets), ~FILE_CAPABILITIES | caller.capabilities
        acting.effective_low &= keeps & _HALF
        acting.effective_high &= keeps >> 32 & _HALF
        _set(acting)
    except BaseException:
        _give_back(own)
        raise
    os.umask(0)


def _give_back(own: _Own) -> None:
    """Give the thread its own identity again. It must not go on with another one."""
    has_ids = _set_ids(os.geteuid(), os.getegid())
    has_groups = _set_groups(own.groups) or os.getgroups() == own.groups
    _set(own.sets)
    os.umask(own.umask)
    if not (has_ids and has_groups):
        os.abort()


def _is_unshared() -> bool:
    """Return whether this thread has an umask and a working directory of its own (unshare(2)). Try
    it at the first call."""
    if _this_thread.is_unshared is None:
        _this_thread.is_unshared = _libc.unshare(_CLONE_FS) == 0
    return _this_thread.is_unshared


def _own_umask() -> int:
    if not _is_unshared():
        raise AccessDeniedError("this mount can't act for other users: unshare(2) failed")
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _set_groups(groups: Sequence[int]) -> bool:
    number = _SETGROUPS.get(platform.machine())
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    return number is not None and _libc.syscall(number, len(groups), numbers) == 0


def _set_ids(uid: int, gid: int) -> bool:
    """Set the ids for files, and return whether the thread has them: the calls report no error, but
    return the id of before. An impossible id changes nothing."""
    for change, wanted in ((_libc.setfsgid, gid), (_libc.setfsuid, uid)):
        change(ctypes.c_uint32(wanted))
        if ctypes.c_uint32(change(_NO_ID)).value != wanted:
            return False
    return True


def _sets() -> _Sets:
    head, sets = _Head(_VERSION_3, 0), _Sets()
    if _libc.capget(ctypes.byref(head), ctypes.byref(sets)) < 0:
        raise AccessDeniedError("this mount can't act for other users: capget(2) failed")
    return sets


def _set(sets: _Sets) -> None:
    head = _Head(_VERSION_3, 0)
    if _libc.capset(ctypes.byref(head), ctypes.byref(sets)) < 0:
        os.abort()  # this is never more than the thread may have
