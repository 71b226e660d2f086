"""Find the mount that a command is about."""

import time
from pathlib import Path

from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.mounts import (
    checked_mountpoint,
    find_entry,
    not_mounted,
    nothing_mounted,
    read_entries,
    served_on,
)

_LAST_BREATH_S = 0.5
"""How long to wait for the mount's end. A killed daemon closes its socket before it releases the
mountpoint."""


def live_mounts() -> list[Path]:
    """Return the mounts of this user that a daemon or a supervisor serves."""
    return [Path(entry.mountpoint) for entry in read_entries() if entry.alive]


def the_mount(mountpoint: str | None) -> Path:
    """Return the mount on `mountpoint`, or the only one. Raises `MountError`, `UsageError`."""
    alive = live_mounts()
    if mountpoint is not None:
        place = served_on(checked_mountpoint(mountpoint))
        if place not in alive:
            raise not_mounted(place)
        return place
    if not alive:
        raise nothing_mounted()
    if len(alive) > 1:
        raise UsageError(f"there are several mounts: {', '.join(map(str, alive))}; name one")
    return alive[0]


def mountpoint_or_configured(mountpoint: str | None, config_file: str | None) -> str | None:
    """Return `mountpoint` if it is given, else the one in the TOML file, else None."""
    if mountpoint is not None or config_file is None:
        return mountpoint
    from cachefs.config import mountpoint_in

    return str(mountpoint_in(Path(config_file)))


def why_silent(place: Path, error: CachefsError) -> CachefsError:
    """Return the error to show when a daemon that answered before no longer does: "the mount has
    ended" if that happens within `_LAST_BREATH_S`, else `error`."""
    deadline = time.monotonic() + _LAST_BREATH_S
    while (entry := find_entry(place)) is not None and entry.alive:
        if time.monotonic() > deadline:
            return error
        time.sleep(0.02)
    return MountError(f"{place}: the mount has ended")
