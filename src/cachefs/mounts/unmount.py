"""Removing a mount, as root or as the user who made it; and who keeps it from being removed."""

import ctypes
import errno
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from cachefs.mounts.table import find_mount

_MNT_FORCE = 1
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8


def unmount(mountpoint: Path, *, lazy: bool = False, force: bool = False) -> None:
    """Remove the mount on `mountpoint`. `lazy` hides it now and frees it once nobody uses it;
    `force` also makes its pending requests fail.

    Raises `OSError`: EBUSY when in use, EINVAL when nothing is mounted, EPERM without the right.
    """
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy or force else 0)
        if force:
            _umount2(mountpoint, _UMOUNT_NOFOLLOW | _MNT_FORCE, ignore_errors=True)
            if find_mount(mountpoint) is None:
                return
        _umount2(mountpoint, flags)
    else:
        _fusermount(mountpoint, lazy=lazy or force)


def _umount2(mountpoint: Path, flags: int, *, ignore_errors: bool = False) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mountpoint), flags) != 0 and not ignore_errors:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(mountpoint))


def _fusermount(mountpoint: Path, *, lazy: bool) -> None:
    """Unmounts a user's own FUSE mount; its messages become errno values."""
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
    """A process that keeps a mount busy, and one thing by which it does."""

    pid: int
    name: str
    what: str


def holders(mountpoint: Path, limit: int = 5) -> list[Holder]:
    """Processes with a working directory, root, program, open or mapped file below `mountpoint`,
    at most `limit` and only those that we may look into. Only names are compared: no access."""
    found: list[Holder] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and len(found) < limit:
            what = _held_by(entry, mountpoint)
            if what is not None:
                found.append(Holder(int(entry.name), _process_name(entry), what))
    return found


def _held_by(process: Path, mountpoint: Path) -> str | None:
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
