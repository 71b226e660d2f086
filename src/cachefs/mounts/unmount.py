"""Unmounts as root or as the mount's user, and finds the processes that keep a mount busy."""

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cachefs.mounts.table import find_mount
from cachefs.trusted_path import opened_parent

_MNT_FORCE = 1
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_OPEN_TREE = 428
"""The number of the system call: glibc has a wrapper only since 2.36."""
_OPEN_TREE_CLONE = 1
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_CAT = "/bin/cat"


def unmount(mountpoint: Path, *, lazy: bool = False, force: bool = False) -> None:
    """Remove the mount on `mountpoint`.

    `lazy` hides it now, and the kernel frees it when its last user has closed it. `force` is lazy,
    too, and for root it also makes pending requests fail. Raises `OSError`: EBUSY if the mount is
    in use, EINVAL if nothing is mounted, EPERM without the right.

    For root the call does not wait until the kernel has freed the names that it holds of the mount,
    which takes some 10 us for each.
    """
    if os.geteuid() != 0:
        _fusermount(mountpoint, lazy=lazy or force)
        return
    with opened_parent(mountpoint) as (parent_fd, name):
        place = Path(f"/proc/self/fd/{parent_fd}", name)  # no link can lead this elsewhere
        with _freed_in_another_process(place):
            if force:
                _umount2(place, _UMOUNT_NOFOLLOW | _MNT_FORCE, ignore_errors=True)
                if find_mount(mountpoint) is None:
                    return
            _umount2(place, _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy or force else 0))


def unmount_from(place_fd: int) -> None:
    """Remove lazily what root has mounted on a directory, of which `place_fd` is an O_PATH
    descriptor from before. The directory may have been moved. Raises `OSError`."""
    name = Path(f"/proc/self/fd/{place_fd}").readlink().name
    # The kernel does not let a mountpoint be renamed, only what is above it.
    _umount2(Path(f"/proc/self/fd/{place_fd}", "..", name), _UMOUNT_NOFOLLOW | _MNT_DETACH)


@contextmanager
def _freed_in_another_process(mountpoint: Path) -> Iterator[None]:
    """Let another process drop the last reference to a file system that the body unmounts.

    The process that drops it waits for the kernel: first the connection to the daemon ends, then
    the kernel frees all names and inodes. The reference here is a detached copy of the mount. It
    does not make the mount busy. Without it (Linux before 5.2, or nothing is mounted) the body
    itself drops the last reference.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _OPEN_TREE_CLONE | _AT_SYMLINK_NOFOLLOW | os.O_CLOEXEC
    copy = libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(mountpoint), flags)
    try:
        yield
    finally:
        if copy >= 0:
            _close_in_another_process(copy)


def _close_in_another_process(descriptor: int) -> None:
    """Close the descriptor here, and then in a process that nobody waits for."""
    until, go = os.pipe()
    try:
        # It ends when the pipe, its stdin, is closed. It must not use the descriptor, as its stdout
        # for example: a call on a mount whose daemon hangs does not return.
        actions = [
            (os.POSIX_SPAWN_DUP2, until, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, 3),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        with contextlib.suppress(OSError):  # no such program: then this process waits
            os.posix_spawn(_CAT, [_CAT], {}, file_actions=actions, setsid=True)
    finally:
        for number in (descriptor, until, go):
            os.close(number)


def _umount2(mountpoint: Path, flags: int, *, ignore_errors: bool = False) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mountpoint), flags) != 0 and not ignore_errors:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(mountpoint))


def _fusermount(mountpoint: Path, *, lazy: bool) -> None:
    """Unmount a user's own FUSE mount, and convert fusermount3's messages to errno values."""
    command = ["fusermount3", "-uz" if lazy else "-u", "--", str(mountpoint)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError:
        raise OSError(errno.ENOENT, "fusermount3 is not installed; apt-get install fuse3") from None
    if done.returncode == 0:
        return
    said = done.stderr.strip()
    number = next(
        (n for n in (errno.EBUSY, errno.EINVAL, errno.EPERM) if os.strerror(n) in said), errno.EPERM
    )
    raise OSError(number, said or os.strerror(number), str(mountpoint))


class Holder(NamedTuple):
    """A process that keeps a mount busy, and one path that it uses there (`what`)."""

    pid: int
    name: str
    what: str


def holders(mountpoint: Path, limit: int = 5) -> list[Holder]:
    """Return at most `limit` processes that use a path below `mountpoint`.

    A use is a working directory, root, program, open file or mapped file. Processes of other users
    are found only if this user may read their /proc entries. Only names are compared, so the mount
    is not accessed.
    """
    found: list[Holder] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and len(found) < limit:
            what = _held_by(entry, mountpoint)
            if what is not None:
                found.append(Holder(int(entry.name), _process_name(entry), what))
    return found


def _held_by(process: Path, mountpoint: Path) -> str | None:
    """Return one path below `mountpoint` that a process uses; None if there is none."""
    for link in _links_of(process):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target == str(mountpoint) or target.startswith(f"{mountpoint}/"):
            label = {"cwd": "working directory", "root": "root directory", "exe": "program"}
            return f"{label.get(link.name, 'open file')} {target}"
    return None


def _links_of(process: Path) -> list[Path]:
    links = [process / "cwd", process / "root", process / "exe"]
    for directory in ("fd", "map_files"):
        try:
            links += (process / directory).iterdir()
        except OSError:
            continue
    return links


def _process_name(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"
