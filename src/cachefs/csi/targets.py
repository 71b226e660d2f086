"""The places of volumes in pods: mounts a source there, and removes such mounts."""

import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cachefs.csi.refusal import Refusal
from cachefs.csi.sources import Source
from cachefs.csi.syscalls import NODEV, NOEXEC, NOSUID, RDONLY, bind_mount
from cachefs.mounts import FSTYPE, MountEntry, find_mount, unmount

_MOST_LAYERS = 1024
"""Each replaced source adds one mount over the one before."""

_logger = logging.getLogger(__name__)


class Access(NamedTuple):
    """What a pod may do in a volume, as far as the mount itself allows it."""

    read_only: bool
    no_exec: bool = False

    @property
    def attributes(self) -> int:
        """The attributes of the bind mount."""
        wanted = NOSUID | NODEV
        return wanted | (RDONLY if self.read_only else 0) | (NOEXEC if self.no_exec else 0)


class Claims:
    """The targets that a call works on at present."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: set[Path] = set()

    @contextmanager
    def claim(self, target: Path) -> Iterator[None]:
        """Work on a target alone. Raises `Refusal` if another call works on it."""
        with self._lock:
            if target in self._targets:
                raise Refusal("ABORTED", f"another call works on {target}; try again")
            self._targets.add(target)
        try:
            yield
        finally:
            with self._lock:
                self._targets.discard(target)


def published_on(target: Path) -> MountEntry | None:
    """Return the visible mount on a target; None if there is none.

    Raises `Refusal` if it is not one of cachefs.
    """
    entry = find_mount(target)
    if entry is not None and entry.fstype != FSTYPE:
        raise Refusal("INTERNAL", f"a {entry.fstype} is mounted on {target}, no cachefs mount")
    return entry


def publish(source: Source, target: Path, access: Access, published: MountEntry | None) -> None:
    """Show a source on a target. `published` is the mount that is there.

    A mount that shows the same is left alone. One that shows another device or directory is
    covered: containers that get mounts from the host (HostToContainer) see a mount over the one
    that they have, and would not see one beside it. Raises `Refusal`, `OSError`.
    """
    if published is not None and (published.device, published.root) == source[1:3]:
        if published.read_only != (access.read_only or source.read_only):
            is_now = "read-only" if published.read_only else "writable"
            raise Refusal("ALREADY_EXISTS", f"the volume is on {target} already, but {is_now}")
        return
    is_new = published is None and _make_directory(target)
    try:
        _bind(source, target, access, over=published is not None)
    except BaseException:
        if is_new:
            with suppress(OSError):
                target.rmdir()
        raise
    _logger.info("%s %s", "mounted" if published is None else "mounted again", target)


def _bind(source: Source, target: Path, access: Access, over: bool) -> None:
    """Mount a source on a target; `over` says whether a mount is there that it may cover."""
    try:
        bind_mount(source.descriptor, target, access.attributes)
    except FileNotFoundError:
        if not over:
            raise
        # The kernel mounts nothing over a directory that was removed from its file system.
        _unmount_all(target)
        bind_mount(source.descriptor, target, access.attributes)


def unpublish(target: Path) -> None:
    """Remove all mounts on a target, and its directory. Do nothing if there is none.

    The unmounting is lazy: a process that still has files open there keeps them until it closes
    them, and the mount of the node is not concerned. Raises `Refusal`, `OSError`.
    """
    if _unmount_all(target):
        _logger.info("unmounted %s", target)
    with suppress(FileNotFoundError):
        target.rmdir()


def _unmount_all(target: Path) -> int:
    """Unmount what is on a target, lazily, and return how many mounts there were."""
    count = 0
    while published_on(target) is not None and count < _MOST_LAYERS:
        unmount(target, lazy=True)
        count += 1
    return count


def _make_directory(target: Path) -> bool:
    """Make the directory of a target; False if it exists. Raises `Refusal`."""
    try:
        target.mkdir(0o750)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(target).st_mode):
            raise Refusal("INVALID_ARGUMENT", f"{target} exists and is no directory") from None
        return False
    except FileNotFoundError:
        raise Refusal("FAILED_PRECONDITION", f"there is no directory {target.parent}") from None
    return True
