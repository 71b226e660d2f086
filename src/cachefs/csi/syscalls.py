"""System calls for which Python has no functions: paths that can't lead out, and bind mounts.

The numbers are the same on all architectures since Linux 5.1. The newest call, mount_setattr, came
with Linux 5.12 (mount_setattr(2)).
"""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_OPEN_TREE = 428
_MOVE_MOUNT = 429
_OPENAT2 = 437
_MOUNT_SETATTR = 442

_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x04
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_AT_EMPTY_PATH = 0x1000
_MS_PRIVATE = 1 << 18

RDONLY: Final = 0x1
NOSUID: Final = 0x2
NODEV: Final = 0x4
NOEXEC: Final = 0x8

_MOST_TRIES = 16
"""openat2 with RESOLVE_BENEATH fails with EAGAIN if a name is renamed meanwhile (openat2(2))."""

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


class _MountAttr(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    )


def open_beneath(directory: int, path: str) -> int:
    """Return an O_PATH descriptor of a directory beneath the descriptor `directory`.

    Links are followed as long as they stay beneath it and on the same mount. Raises `OSError`:
    EXDEV if a link leads out, ENOTDIR, ENOENT, and what the file system says.
    """
    how = _OpenHow(
        flags=os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC,
        resolve=_RESOLVE_BENEATH | _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS,
    )
    for attempt in range(_MOST_TRIES):
        try:
            return _call(
                _OPENAT2, directory, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how)
            )
        except BlockingIOError:
            if attempt == _MOST_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def bind_mount(source: int, target: Path, attributes: int) -> None:
    """Mount what the descriptor `source` shows on `target`, with `attributes` (RDONLY and so on).

    The mount has its attributes before anybody can see it, and does not share later mounts with
    `source`. If there is a mount on `target`, the new one covers it. Neither the source nor such a
    mount is asked anything, so this does not wait for a daemon. Raises `OSError`.
    """
    tree = _call(_OPEN_TREE, source, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH)
    try:
        wanted = _MountAttr(attr_set=attributes, propagation=_MS_PRIVATE)
        _call(
            _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(wanted), ctypes.sizeof(wanted)
        )
        place = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
            _call(_MOVE_MOUNT, tree, b"", place, b"", flags)
        finally:
            os.close(place)
    finally:
        os.close(tree)


def _call(number: int, *arguments: Any) -> int:
    """Make a system call. Raises `OSError`."""
    syscall: Callable[..., int] = _libc.syscall
    result = syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        if error == errno.ENOSYS:
            raise OSError(error, "the kernel is older than Linux 5.12")
        raise OSError(error, os.strerror(error))
    return result
