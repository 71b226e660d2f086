"""Finds the mount and the directory of a volume on this node, and checks that they answer."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cachefs.csi.limited_calls import CallHangsError, LimitedCalls
from cachefs.csi.refusal import Code, Refusal
from cachefs.csi.syscalls import open_beneath
from cachefs.csi.volumes import Volume
from cachefs.mounts import FSTYPE, MountEntry, find_mount

DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""What a mount without a daemon answers."""


class Source(NamedTuple):
    """The directory that a volume shows: an O_PATH descriptor, and how the mount table names it.

    `read_only` is whether the mount itself is read-only.
    """

    descriptor: int
    device: str
    root: str
    read_only: bool

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class Sources:
    """The mounts of this node: those on directories in `mounts` (canonical)."""

    def __init__(self, mounts: Path, calls: LimitedCalls) -> None:
        self.mounts = mounts
        self._calls = calls

    def open(self, volume: Volume) -> Source:
        """Return the source of a volume; the caller closes it.

        Raises `Refusal`: NOT_FOUND if there is no such volume, INVALID_ARGUMENT if a link leads out
        of the mount, FAILED_PRECONDITION if it is another file system's, UNAVAILABLE if it is not
        mounted now, or if the daemon does not answer.
        """
        entry = self.entry(volume.mount)
        place = entry.mountpoint
        try:
            return self._calls.run(entry.device, self._opener(entry, volume), Source.close)
        except CallHangsError as error:
            raise Refusal("UNAVAILABLE", f"{place} hangs: {error}; {_look_at(place)}") from error
        except OSError as error:
            code, text = _explain(error, place, volume)
            raise Refusal(code, text) from error

    def entry(self, name: str) -> MountEntry:
        """Return the entry of a mount by its name, without access to it. Raises `Refusal`."""
        place = self.mounts / name
        entry = find_mount(place)
        if entry is None:
            if self._exists(name):
                raise Refusal("UNAVAILABLE", f"{place} is not mounted now; {_look_at(place)}")
            raise Refusal(
                "NOT_FOUND",
                f"there is no mount {name!r} in {self.mounts} on this node; name one that "
                "cachefs status shows there",
            )
        if entry.fstype != FSTYPE:
            raise Refusal("FAILED_PRECONDITION", f"{place} is a {entry.fstype}, no cachefs mount")
        return entry

    def _exists(self, name: str) -> bool:
        """Whether the directory of mounts has the name. It is listed, because a look-up of a mount
        asks its daemon."""
        try:
            return name in os.listdir(self.mounts)
        except OSError:
            return False

    def _opener(self, entry: MountEntry, volume: Volume) -> Callable[[], Source]:
        place = entry.mountpoint

        def open_source() -> Source:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            top = os.open(place, flags)
            try:
                found = os.fstat(top).st_dev
                if f"{os.major(found)}:{os.minor(found)}" != entry.device:
                    raise OSError(errno.ENOTCONN, "the mount has just been replaced")
                inner = open_beneath(top, volume.directory or ".")
            finally:
                os.close(top)
            try:
                os.fstatvfs(inner)  # the kernel has no cached answer, so the daemon has to give one
                os.fstat(inner)  # fails with EACCES in another user's mount
                # Its links are resolved now, as in the mount table.
                below = os.path.relpath(Path(f"/proc/self/fd/{inner}").readlink(), place)
            except BaseException:
                os.close(inner)
                raise
            root = os.path.normpath(os.path.join(entry.root, below))
            return Source(inner, entry.device, root, entry.read_only)

        return open_source


def _explain(error: OSError, place: Path, volume: Volume) -> tuple[Code, str]:
    """Return the code and the text for an error of the opener."""
    if error.errno in DEAD:
        return "UNAVAILABLE", f"{place} is dead: its daemon has ended; {_look_at(place)}"
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return "NOT_FOUND", f"{volume.directory!r} is no directory in {place}"
    if error.errno in {errno.EXDEV, errno.ELOOP}:
        return "INVALID_ARGUMENT", f"a link in {volume.directory!r} leads out of {place}"
    if error.errno == errno.EACCES:
        return (
            "FAILED_PRECONDITION",
            f"only the user who has mounted {place} may read it; mount it as root",
        )
    return "UNAVAILABLE", f"can't open {volume} in {place}: {error.strerror}; {_look_at(place)}"


def _look_at(place: Path) -> str:
    return f"look at the log of the daemon that serves {place} on this node, and at cachefs status"
