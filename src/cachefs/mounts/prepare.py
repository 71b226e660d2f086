"""Checks whether a directory can be mounted on, and removes mounts of dead daemons first."""

import errno
import logging
import os
import stat
from pathlib import Path

from cachefs.errors import MountError
from cachefs.mounts.table import FSTYPE, MountEntry, MountHealth, check_answers, find_mount
from cachefs.mounts.unmount import unmount

_MAX_STALE_LAYERS = 16

_logger = logging.getLogger(__name__)


def prepare_mountpoint(mountpoint: Path, allow_nonempty: bool = False) -> None:
    """Make sure that `mountpoint` (canonical) can be mounted on.

    Mounts that a dead cachefs has left there are unmounted, with a warning in the log. Raises
    `MountError` if the directory is missing, not a directory, not empty (unless `allow_nonempty`),
    or already a mount.
    """
    for _ in range(_MAX_STALE_LAYERS):
        mount = find_mount(mountpoint)
        if mount is None:
            break
        _take_over(mount)
    _check_directory(mountpoint, allow_nonempty)


def _take_over(mount: MountEntry) -> None:
    """Remove a dead cachefs mount; raise `MountError` for any other."""
    place, what = mount.mountpoint, f"{mount.source} ({mount.fstype})"
    if not mount.fstype.startswith("fuse"):
        raise MountError(f"{place} is already a mount of {what}; choose another mountpoint")
    health = check_answers(place)
    if health is MountHealth.DEAD and mount.fstype == FSTYPE:
        unmount(place, lazy=True)
        _logger.warning("unmounted %s, which a dead cachefs had left on %s", mount.source, place)
    elif health is MountHealth.DEAD:
        raise MountError(
            f"{place} is a mount of {what} whose daemon is gone; "
            f"unmount it first: fusermount3 -uz {place}"
        )
    elif mount.fstype == FSTYPE:
        hint = "--force " if health is MountHealth.HANGING else ""
        state = " but does not answer" if health is MountHealth.HANGING else ""
        raise MountError(
            f"{place} is already a cachefs mount of {mount.source}{state}; "
            f"unmount it first: cachefs umount {hint}{place}"
        )
    else:
        raise MountError(f"{place} is already a mount of {what}; choose another mountpoint")


def _check_directory(mountpoint: Path, allow_nonempty: bool) -> None:
    try:
        info = mountpoint.stat()
        entries = os.listdir(mountpoint) if stat.S_ISDIR(info.st_mode) else []
    except FileNotFoundError:
        raise MountError(
            f"the mountpoint {mountpoint} does not exist; create it: mkdir -p {mountpoint}"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise MountError(
                f"{mountpoint} lies on a mount whose daemon is gone; unmount that one first "
                "(cachefs status shows ours, findmnt shows all)"
            ) from error
        raise MountError(f"can't use the mountpoint {mountpoint}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise MountError(f"the mountpoint {mountpoint} is not a directory; choose a directory")
    if entries and not allow_nonempty:
        raise MountError(
            f"the mountpoint {mountpoint} is not empty (it has {_some(entries)}); choose an empty "
            "directory, or hide its entries with -o nonempty"
        )


def _some(entries: list[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(entries)[:3])
    return shown if len(entries) <= 3 else f"{shown} and {len(entries) - 3} more"
