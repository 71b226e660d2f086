"""Which mount a path that a user typed lies in, and where in it."""

import os
from collections.abc import Sequence
from pathlib import Path

from cachefs.errors import MountError, UsageError
from cachefs.mounts.runtime import read_entries
from cachefs.mounts.table import canonical


def locate(paths: Sequence[str], mountpoint: str | None = None) -> tuple[Path, list[str]]:
    """The one mount in which all paths lie, and the paths below its mountpoint ("" is its root).

    A path lies where it is, seen from the working directory; one that isn't there is taken to be
    relative to `mountpoint`, or to the only mount that there is. Nothing in the mount is touched.
    Raises `MountError`, `UsageError`.
    """
    alive = [Path(entry.mountpoint) for entry in read_entries() if entry.alive]
    only = _named(mountpoint, alive) if mountpoint is not None else None
    places: set[Path] = set()
    inner: list[str] = []
    for path in paths:
        if not path or "\0" in path:
            raise UsageError("an empty path; name a file or a directory of a mount")
        place, below = _split(path, alive if only is None else [only])
        if place is None:
            if only is None and os.path.lexists(path):
                raise _nowhere(path)
            place, below = only or _only(alive, path), _relative(path)
        places.add(place)
        inner.append(below)
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise UsageError(f"the paths lie in several mounts, {names}; one at a time, please")
    return (places.pop() if places else only or _only(alive, None)), inner


def _named(mountpoint: str, alive: list[Path]) -> Path:
    place = canonical(Path(mountpoint))
    if place not in alive:
        raise MountError(f"{place} is not mounted by cachefs; cachefs status shows what is")
    return place


def _only(alive: list[Path], path: str | None) -> Path:
    if not alive:
        raise MountError("nothing is mounted by cachefs (or by another user only)")
    if len(alive) > 1:
        what = "no path" if path is None else f"{path} is in no mount, and"
        names = ", ".join(map(str, alive))
        raise UsageError(f"{what} says which of {names} is meant; add --mount MOUNTPOINT")
    return alive[0]


def _split(path: str, mounts: list[Path]) -> tuple[Path | None, str]:
    """By name: nothing below a mountpoint is asked for, as that may wait for an origin."""
    absolute = Path(os.path.abspath(path))
    found = _below(absolute, mounts)
    if found[0] is None:  # a link may lead into one
        found = _below(Path(os.path.realpath(path)), mounts)
    return found


def _below(path: Path, mounts: list[Path]) -> tuple[Path | None, str]:
    for mount in sorted(mounts, key=lambda mount: len(mount.parts), reverse=True):
        if path.is_relative_to(mount):
            below = str(path.relative_to(mount))
            return mount, "" if below == "." else below
    return None, ""


def _relative(path: str) -> str:
    if path.startswith("/"):
        raise _nowhere(path)
    if "://" in path:
        return path  # the daemon knows its source
    below = os.path.normpath(path)
    if below == ".." or below.startswith("../"):
        raise UsageError(f"{path} leads out of the mount")
    return "" if below == "." else below


def _nowhere(path: str) -> UsageError:
    return UsageError(f"{path} lies in no mount of cachefs; cachefs status shows what is")
