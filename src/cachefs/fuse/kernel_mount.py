"""Mounting with a /dev/fuse descriptor that this process keeps: by mount(2), or by fusermount3.

This module does the work of libfuse's mount.c without libfuse, because the process that holds the
descriptor may not be the one that answers requests. It must not import pyfuse3.
"""

import ctypes
import errno
import os
import pwd
import shutil
import socket
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cachefs.errors import MountError
from cachefs.mounts import FSTYPE, MountEntry, all_mounts, find_mount, unmount, unmount_from
from cachefs.trusted_path import open_place

_DEVICE = Path("/dev/fuse")
_FUSE_CONF = Path("/etc/fuse.conf")
_HELPER = "fusermount3"
_COMM_FD = "_FUSE_COMMFD"
"""Environment variable with the socket to which fusermount3 sends the descriptor, as it does for
libfuse."""
_MAX_READ_BYTES = 1 << 20

_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4


class KernelMount(NamedTuple):
    """An existing mount.

    `fd` is its /dev/fuse descriptor, -1 if this process has none. The tuple does not own it.
    `device` is the mount's "MAJOR:MINOR" in the mount table.
    """

    mountpoint: Path
    fd: int
    device: str

    def is_there(self) -> bool:
        """Return whether this mount is still the visible one at its mountpoint."""
        mount = find_mount(self.mountpoint)
        return mount is not None and mount.device == self.device

    def detach(self) -> None:
        """Unmount lazily: hide the mount now; it ends when its last user has closed it.

        Does nothing if the mount is gone. Raises `OSError`.
        """
        if not self.is_there():
            return
        try:
            unmount(self.mountpoint, lazy=True)
        except OSError as error:
            if error.errno != errno.EINVAL or self.is_there():
                raise  # else somebody has unmounted it at this moment


def kernel_mount(
    mountpoint: Path, source: str, allow_other: bool, writable: bool = False
) -> KernelMount:
    """Mount; the kernel enforces permissions. `source` appears in the mount table. Without
    `writable`, the kernel refuses writes with EROFS.

    The caller owns the descriptor in the result and must close it. Raises `MountError`.
    """
    refuse_early(allow_other)
    try:
        place_fd = open_place(mountpoint)
    except OSError as error:
        raise MountError(f"can't mount on {mountpoint}: {error.strerror}") from error
    try:
        return _mount_on(place_fd, mountpoint, source, allow_other, writable)
    finally:
        os.close(place_fd)


def _mount_on(
    place_fd: int, mountpoint: Path, source: str, allow_other: bool, writable: bool
) -> KernelMount:
    """Mount on the place of an O_PATH descriptor, and check that `mountpoint` still names it.

    Another user may own a directory above, and could put a link to any directory into its place.
    """
    is_root = os.geteuid() == 0
    fd = _by_kernel(place_fd, mountpoint, source, allow_other, writable) if is_root else None
    by_kernel = fd is not None
    if fd is None:
        fd = _by_helper(mountpoint, source, allow_other, writable)
    try:
        return KernelMount(mountpoint, fd, _mount_at(place_fd, mountpoint).device)
    except MountError:
        with suppress(OSError):
            unmount_from(place_fd) if by_kernel else unmount(mountpoint, lazy=True)
        os.close(fd)
        raise


def _mount_at(place_fd: int, mountpoint: Path) -> MountEntry:
    """Return the new mount on the place of `place_fd`. Raises `MountError` if it is not there, or
    is not at `mountpoint`."""
    now = Path(f"/proc/self/fd/{place_fd}").readlink()
    if now != mountpoint:
        raise MountError(
            f"{mountpoint} was moved to {now} while it was mounted, so it is unmounted again; name "
            "a mountpoint that other users can't move"
        )
    info = Path(f"/proc/self/fdinfo/{place_fd}").read_text(encoding="ascii").split()
    above = info[info.index("mnt_id:") + 1]
    for mount in reversed(all_mounts()):
        if (mount.mountpoint, mount.parent_id, mount.fstype) == (mountpoint, above, FSTYPE):
            return mount
    raise MountError(f"{mountpoint} was mounted and is not any more; somebody unmounts there")


def shown_source(source: str) -> str:
    """Return `source` quoted for a list of mount options, which is separated by commas."""
    return quote(source, safe="/:@?&=+~!$'()*;%#")


def refuse_early(allow_other: bool) -> None:
    """Check the conditions for which libfuse and fusermount3 have unclear error messages.

    Raises `MountError`.
    """
    if not _DEVICE.exists():
        raise MountError(
            f"there is no {_DEVICE}; load the module (modprobe fuse), or give the device to the "
            "container"
        )
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        raise MountError(f"uid {os.getuid()} may not open {_DEVICE}; as root: chmod 666 {_DEVICE}")
    if os.geteuid() == 0:
        return
    if not _has_a_name(os.getuid()):
        raise MountError(
            f"uid {os.getuid()} has no name, and fusermount3 mounts only for users that have one; "
            "add a line to /etc/passwd"
        )
    if allow_other and not _users_may_allow_others():
        raise MountError(
            f"allow_other: only root may, or all users where {_FUSE_CONF} has the line "
            "user_allow_other; add it or leave the option out"
        )


def _has_a_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _users_may_allow_others() -> bool:
    try:
        lines = _FUSE_CONF.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return False
    except OSError:
        return True  # fusermount3 can read the file and decides
    return "user_allow_other" in (line.strip() for line in lines)


def _by_kernel(
    place_fd: int, mountpoint: Path, source: str, allow_other: bool, writable: bool
) -> int | None:
    """Mount by mount(2) on the place of an O_PATH descriptor, which errors call `mountpoint`, and
    return the descriptor. Raises `MountError`.

    Return None if root lacks the right to mount here (EPERM) but fusermount3, which may have it, is
    installed.
    """
    try:
        fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(
            f"can't open {_DEVICE}: {error.strerror}; in a container, allow it the device"
        ) from error
    try:
        mode = stat.S_IFMT(os.fstat(place_fd).st_mode)
        words = [f"fd={fd},rootmode={mode:o},user_id={os.getuid()},group_id={os.getgid()}"]
        words += ["default_permissions", f"max_read={_MAX_READ_BYTES}"]
        if allow_other:
            words.append("allow_other")
        _mount2(shown_source(source), place_fd, ",".join(words), writable)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EPERM and shutil.which(_HELPER) is not None:
            return None
        fix = "; it takes CAP_SYS_ADMIN" if error.errno == errno.EPERM else ""
        raise MountError(f"can't mount on {mountpoint}: {error.strerror}{fix}") from error
    return fd


def _mount2(source: str, place_fd: int, options: str, writable: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | (0 if writable else _MS_RDONLY)
    place = f"/proc/self/fd/{place_fd}".encode()
    name = source.encode("utf-8", "surrogateescape")
    if libc.mount(name, place, FSTYPE.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _by_helper(mountpoint: Path, source: str, allow_other: bool, writable: bool) -> int:
    """Mount by fusermount3, which is setuid root, and return the descriptor that it sends.

    Raises `MountError`.
    """
    subtype = FSTYPE.removeprefix("fuse.")
    words = ["rw" if writable else "ro", "nosuid", "nodev"]
    words += [f"fsname={shown_source(source)}", f"subtype={subtype}"]
    words += ["default_permissions", f"max_read={_MAX_READ_BYTES}"]
    if allow_other:
        words.append("allow_other")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with its:
            process = _start_helper(its.fileno(), ",".join(words), mountpoint)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        said = " ".join(process.communicate()[1].split()).removeprefix(f"{_HELPER}: ")
    if process.returncode != 0 or not fds:
        for fd in fds:
            os.close(fd)
        raise MountError(
            f"can't mount on {mountpoint}: {said or f'{_HELPER} failed'}; is fuse3 installed, and "
            "may this user mount?"
        )
    os.set_inheritable(fds[0], False)
    return fds[0]


def _start_helper(comm_fd: int, options: str, mountpoint: Path) -> "subprocess.Popen[str]":
    try:
        return subprocess.Popen(
            [_HELPER, "-o", options, "--", str(mountpoint)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[comm_fd],
            env={**os.environ, _COMM_FD: str(comm_fd), "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise MountError(
            f"can't mount on {mountpoint}: {_HELPER} is not installed; apt-get install fuse3"
        ) from None
