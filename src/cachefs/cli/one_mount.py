"""The mount that a command is about."""

from pathlib import Path

from cachefs.errors import MountError, UsageError
from cachefs.mounts import canonical, read_entries


def the_mount(mountpoint: str | None) -> Path:
    """That on `mountpoint`, or the only one. Raises `MountError`, `UsageError`."""
    alive = [Path(entry.mountpoint) for entry in read_entries() if entry.alive]
    if mountpoint is not None:
        if not mountpoint or "\0" in mountpoint:
            raise UsageError("the mountpoint is empty; name a directory")
        place = canonical(Path(mountpoint))
        if place not in alive:
            raise MountError(f"{place} is not mounted by cachefs; cachefs status shows what is")
        return place
    if not alive:
        raise MountError("nothing is mounted by cachefs (or by another user only)")
    if len(alive) > 1:
        raise UsageError(f"there are several mounts: {', '.join(map(str, alive))}; name one")
    return alive[0]
