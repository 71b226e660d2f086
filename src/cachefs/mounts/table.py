"""Reads the kernel's mount table, and checks whether a mount answers.

Reading the table (/proc/self/mountinfo) does not access the mounts, so a dead or hanging mount does
not block it.
"""

import errno
import os
import re
import threading
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from cachefs.trusted_path import resolve

FSTYPE = "fuse.cachefs"
"""File system type of our mounts: fuse with `subtype=cachefs`."""

ANSWER_TIMEOUT_S = 5.0

_ALL_UIDS = ["0", "0", "4294967295"]
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


class MountEntry(NamedTuple):
    """One line of the kernel's mount table.

    `device` is "MAJOR:MINOR", the same for all mounts of one file system. `root` is the visible
    directory of that file system: "/", or a directory below it for a bind mount. `options` are
    those of this mount alone, such as "rw,nosuid". `file_system_options` are those of the file
    system, such as "ro,user_id=0". `parent_id` is the `mount_id` of the mount that it is on.
    """

    mountpoint: Path
    fstype: str
    source: str
    device: str = ""
    root: str = "/"
    options: str = ""
    file_system_options: str = ""
    mount_id: str = ""
    parent_id: str = ""

    @property
    def read_only(self) -> bool:
        """Whether this mount is read-only; its file system may be so, too."""
        return "ro" in self.options.split(",")

    @property
    def other_user(self) -> int | None:
        """The uid of the user who mounted a FUSE file system; None if that is this user, or can't
        be known here. The kernel names the uid in the user namespace of the mount, so it means
        something only outside user namespaces."""
        named = re.search(r"(?:^|,)user_id=(\d+)(?:,|$)", self.file_system_options)
        if named is None or int(named[1]) == os.geteuid() or _has_own_users():
            return None
        return int(named[1])


def _has_own_users() -> bool:
    """Return whether this process is in a user namespace, see user_namespaces(7)."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != _ALL_UIDS
    except OSError:
        return False  # a kernel without user namespaces


class MountHealth(Enum):
    """The result of `check_answers`."""

    ALIVE = "alive"
    DEAD = "dead"  # ENOTCONN: its daemon is gone
    HANGING = "hanging"  # no answer within ANSWER_TIMEOUT_S
    FORBIDDEN = "forbidden"  # another user's mount without allow_other


def parse_mountinfo(lines: Iterable[str]) -> list[MountEntry]:
    """Return the mounts in mounting order. If several are on one mountpoint, the last is visible.

    Lines that don't have the form in proc(5) are left out.
    """
    mounts = []
    for line in lines:
        left, separator, right = line.rstrip("\n").partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if separator and len(fields) >= 6 and len(rest) >= 2:
            place, source = Path(_unescape(fields[4])), _unescape(rest[1])
            root = _unescape(fields[3])
            options = fields[5], rest[2] if len(rest) > 2 else ""
            mounts.append(
                MountEntry(place, rest[0], source, fields[2], root, *options, *fields[:2])
            )
    return mounts


def _unescape(text: str) -> str:
    """Decode octal escapes: mountinfo has a space as \\040, and encodes bytes, not characters."""
    raw = text.encode("utf-8", "surrogateescape")
    raw = _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), raw)
    return raw.decode("utf-8", "surrogateescape")


def all_mounts() -> list[MountEntry]:
    """Return every mount that this process can see."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return parse_mountinfo(lines)


def cachefs_mounts() -> list[MountEntry]:
    """Return all cachefs mounts, also dead ones."""
    return [mount for mount in all_mounts() if mount.fstype == FSTYPE]


def find_mount(mountpoint: Path) -> MountEntry | None:
    """Return the visible mount on exactly this (canonical) path; None if there is none."""
    return next((m for m in reversed(all_mounts()) if m.mountpoint == mountpoint), None)


def mount_above(path: Path) -> MountEntry | None:
    """Return the visible mount in which an absolute path lies, by its name alone. None only if the
    process can't see its root file system."""
    return deepest_mount(all_mounts(), path)


def deepest_mount(mounts: Iterable[MountEntry], path: Path) -> MountEntry | None:
    """Do the same in a mount table that was read before."""
    above = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    return max(reversed(above), key=lambda mount: len(mount.mountpoint.parts), default=None)


def canonical(path: Path) -> Path:
    """Return the path as the mount table has it: absolute, with links resolved.

    If the path is a mountpoint, the function does not access it. Raises `UntrustedPathError` for a
    link of another user.
    """
    path = Path(os.path.abspath(path))
    return path if find_mount(path) else resolve(path)


def check_answers(mountpoint: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> MountHealth:
    """Check whether the file system at `mountpoint` answers within `timeout_s`.

    It uses both statvfs and stat. The kernel answers stat from its attribute cache long after a
    daemon's death. It never caches statvfs, but statvfs does not fail on forbidden mounts.
    """
    answer: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(mountpoint)
            os.stat(mountpoint)  # noqa: PTH116
            answer.append(0)
        except OSError as error:
            answer.append(error.errno or errno.EIO)

    thread = threading.Thread(target=ask, name="cachefs-check-answers", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answer:
        return MountHealth.HANGING
    if answer[0] in {errno.ENOTCONN, errno.ECONNABORTED}:
        return MountHealth.DEAD
    return MountHealth.FORBIDDEN if answer[0] == errno.EACCES else MountHealth.ALIVE
