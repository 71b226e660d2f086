"""What is mounted where, and whether it answers.

The kernel's table (/proc/self/mountinfo) is read without touching the mounts, so a dead or
hanging one does no harm here.
"""

import errno
import os
import re
import threading
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

FSTYPE = "fuse.cachefs"
"""File system type of our mounts: fuse with `subtype=cachefs`."""

PROBE_TIMEOUT_S = 5.0

_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    """One line of the kernel's mount table. `device` is "MAJOR:MINOR", the same for all mounts of
    one file system; `root` is what of it is seen: "/", or less with a bind mount."""

    mountpoint: Path
    fstype: str
    source: str
    device: str = ""
    root: str = "/"


class Health(Enum):
    """What a file system answers to a stat of its root."""

    ALIVE = "alive"
    DEAD = "dead"  # ENOTCONN: its daemon is gone
    HANGING = "hanging"  # no answer within PROBE_TIMEOUT_S
    FORBIDDEN = "forbidden"  # another user's mount without allow_other


def parse_mountinfo(lines: Iterable[str]) -> list[Mount]:
    """The mounts in mounting order (of several on one mountpoint the last is seen).

    Lines that don't have the form described in proc(5) are left out.
    """
    mounts = []
    for line in lines:
        left, separator, right = line.rstrip("\n").partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if separator and len(fields) >= 6 and len(rest) >= 2:
            place, source = Path(_unescape(fields[4])), _unescape(rest[1])
            root = _unescape(fields[3])
            mounts.append(Mount(place, rest[0], source, fields[2], root))
    return mounts


def _unescape(text: str) -> str:
    """Spaces and the like stand as \\040 in mountinfo, in bytes."""
    raw = text.encode("utf-8", "surrogateescape")
    raw = _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), raw)
    return raw.decode("utf-8", "surrogateescape")


def all_mounts() -> list[Mount]:
    """Every mount that this process can see."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return parse_mountinfo(lines)


def cachefs_mounts() -> list[Mount]:
    """Our mounts, dead ones included."""
    return [mount for mount in all_mounts() if mount.fstype == FSTYPE]


def find_mount(mountpoint: Path) -> Mount | None:
    """What is mounted on exactly this (canonical) path, or None."""
    return next((m for m in reversed(all_mounts()) if m.mountpoint == mountpoint), None)


def canonical(path: Path) -> Path:
    """Absolute, links resolved, as the kernel's table has it; a mountpoint itself isn't touched."""
    path = Path(os.path.abspath(path))
    return path if find_mount(path) else Path(os.path.realpath(path))


def probe(mountpoint: Path, timeout_s: float = PROBE_TIMEOUT_S) -> Health:
    """Ask the file system at `mountpoint` for its root, waiting no longer than `timeout_s`.

    A stat alone won't do: the kernel answers it from its attribute cache long after a daemon's
    death. It never caches statvfs, which in turn doesn't tell about forbidden mounts.
    """
    answer: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(mountpoint)
            os.stat(mountpoint)  # noqa: PTH116
            answer.append(0)
        except OSError as error:
            answer.append(error.errno or errno.EIO)

    thread = threading.Thread(target=ask, name="cachefs-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answer:
        return Health.HANGING
    if answer[0] in {errno.ENOTCONN, errno.ECONNABORTED}:
        return Health.DEAD
    return Health.FORBIDDEN if answer[0] == errno.EACCES else Health.ALIVE
