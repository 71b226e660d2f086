"""Find the mount that a command is about."""

import time
from pathlib import Path

from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.mounts import find_entry, read_entries, served_on

_LAST_BREATH_S = 0.5
"""How long to wait for the mount's end. A killed daemon closes its socket before it releases the
mountpoint."""


def the_mount(mountpoint: str | None) -> Path:
    """Return the mount on `mountpoint`, or the only one. Raises `MountError`, `UsageError`."""
    alive = [Path(entry.mountpoint) for entry in read_entries() if entry.alive]
    if mountpoint is not None:
        if not mountpoint or "\0" in mountpoint:
            raise UsageError("the mountpoint is empty; name a directory")
        place = served_on(Path(mountpoint))
        if place not in alive:
            raise MountError(f"{place} is not mounted by cachefs; cachefs status shows what is")
        return place
    if not alive:
        raise MountError("nothing is mounted by cachefs (or by another user only)")
    if len(alive) > 1:
        raise UsageError(f"there are several mounts: {', '.join(map(str, alive))}; name one")
    return alive[0]


def why_silent(place: Path, error: CachefsError) -> CachefsError:
    """Return the error to show when a daemon that answered before no longer does: "the mount has
    ended" if that happens within `_LAST_BREATH_S`, else `error`."""
    deadline = time.monotonic() + _LAST_BREATH_S
    while (entry := find_entry(place)) is not None and entry.alive:
        if time.monotonic() > deadline:
            return error
        time.sleep(0.02)
    return MountError(f"{place}: the mount has ended")
