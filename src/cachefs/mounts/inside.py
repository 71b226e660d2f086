"""Finds the mount in which a user's path lies, and the path inside the mount."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.mounts.runtime import RuntimeEntry, read_entries, runtime_dir
from cachefs.mounts.table import FSTYPE, MountEntry, cachefs_mounts, canonical, mount_above

Views = dict[Path, tuple[Path, str]]
"""All places where files of mounts are visible: each daemon's mountpoint, and bind mounts of it or
of a directory in it. The value is the daemon's mountpoint, and the directory in the mount that is
visible there ("" is the root)."""


def locate(paths: Sequence[str], mountpoint: str | None = None) -> tuple[Path, list[str]]:
    """Return the one mount in which all paths lie, and the paths below its mountpoint.

    The path "" is the mount's root. A path is first resolved from the working directory. If it then
    lies outside `mountpoint`, it is taken as relative to `mountpoint`. Without `mountpoint`, a path
    that lies in no mount and does not exist is taken as relative to the only mount. The function
    does not access files in the mount. Raises `MountError`, `UsageError`.
    """
    entries = read_entries()
    alive = [Path(entry.mountpoint) for entry in entries if entry.alive]
    views = _views(entries)
    only = _named(mountpoint, views) if mountpoint is not None else None
    places: set[Path] = set()
    inner: list[str] = []
    for path in paths:
        if not path or "\0" in path:
            raise UsageError("an empty path; name a file or a directory of a mount")
        place, below = _split(path, views)
        if place is None or (only is not None and place != only[0]):
            if only is None and (os.path.lexists(path) or _out_of_reach(path) is not None):
                raise _nowhere(path)
            place, above = only or (_only(alive, path), "")
            below = _joined(above, _relative(path))
        places.add(place)
        inner.append(below)
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise UsageError(f"the paths lie in several mounts, {names}; name paths of one mount")
    if only is not None:
        return only[0], inner
    return (places.pop() if places else _only(alive, None)), inner


def checked_mountpoint(text: str) -> Path:
    """Return the path of a mountpoint that a user has written. Raises `UsageError` if it can't be
    one."""
    if not text or "\0" in text:
        raise UsageError("the mountpoint is empty; name a directory")
    return Path(text)


def not_mounted(place: Path) -> MountError:
    """Return the error for a place (canonical) that no daemon of this user serves."""
    mount = _out_of_reach(str(place))
    if mount is not None:
        return _beyond(mount)
    return MountError(f"{place} is not mounted by cachefs; cachefs status shows what is")


def nothing_mounted() -> MountError:
    """Return the error for a command that needs a mount while this user has none."""
    for mount in cachefs_mounts():
        if _out_of_reach(str(mount.mountpoint)) is not None:
            return _beyond(mount)
    return MountError("nothing is mounted by cachefs; cachefs mount --help shows how to mount")


def why_out_of_reach(mount: MountEntry) -> str:
    """Say why a command of this user can't ask the daemon of a cachefs mount, and what to do."""
    if mount.other_user is not None:
        return (
            f"it belongs to uid {mount.other_user}, and only that user can use its control socket; "
            "run the command as that user"
        )
    return (
        f"no running daemon has a runtime file for it in {runtime_dir()}: it has ended, or it runs "
        "in another container or with another XDG_RUNTIME_DIR; run the command there"
    )


def _beyond(mount: MountEntry) -> MountError:
    why = why_out_of_reach(mount)
    return MountError(
        f"{mount.mountpoint} is a cachefs mount, but {why} (cachefs status shows its state)"
    )


def _out_of_reach(path: str) -> MountEntry | None:
    """Return the cachefs mount in which a path lies if no daemon of this user serves it."""
    for absolute in (os.path.abspath(path), os.path.realpath(path)):
        mount = mount_above(Path(absolute))
        if mount is not None and mount.fstype == FSTYPE:
            entry = entry_of(mount, read_entries())
            return mount if entry is None or not entry.alive else None
    return None


def served_on(path: Path) -> Path:
    """Return the mountpoint of the daemon whose mount, or a bind mount of it, is on `path`.

    If there is none, return `path` in canonical form.
    """
    place = canonical(path)
    return _views(read_entries()).get(place, (place, ""))[0]


def entry_of(mount: MountEntry, entries: Iterable[RuntimeEntry]) -> RuntimeEntry | None:
    """Return the runtime entry of the daemon that serves a mount.

    If no live daemon does, return the mountpoint's own entry, or None. When a mount has ended, the
    kernel may give its device number to another mount at once, while the old daemon still lives. So
    among entries with the same number, the one that began last wins.
    """
    entries = list(entries)
    own = next((e for e in entries if e.mountpoint == str(mount.mountpoint)), None)
    if own is not None and own.alive and own.device in ("", mount.device):
        return own
    same = [e for e in entries if e.alive and e.device and e.device == mount.device]
    return max(same, key=lambda entry: entry.started_at) if same else own


def _views(entries: Sequence[RuntimeEntry]) -> Views:
    alive = [entry for entry in entries if entry.alive]
    views = {Path(entry.mountpoint): (Path(entry.mountpoint), "") for entry in alive}
    for mount in cachefs_mounts():
        entry = entry_of(mount, alive)
        if entry is not None:
            views[mount.mountpoint] = Path(entry.mountpoint), mount.root.strip("/")
    return views


def _named(mountpoint: str, views: Views) -> tuple[Path, str]:
    place = canonical(checked_mountpoint(mountpoint))
    if place not in views:
        raise not_mounted(place)
    return views[place]


def _only(alive: list[Path], path: str | None) -> Path:
    if not alive:
        raise nothing_mounted()
    if len(alive) > 1:
        what = "no path" if path is None else f"{path} is in no mount, and"
        names = ", ".join(map(str, alive))
        raise UsageError(f"{what} says which of {names} is meant; add --mount MOUNTPOINT")
    return alive[0]


def _split(path: str, views: Views) -> tuple[Path | None, str]:
    """Split a path into its mount and the path below it, or None and "" if it lies in no mount.

    Only names are compared. An access to a file below a mountpoint may wait for an origin.
    """
    absolute = Path(os.path.abspath(path))
    found = _below(absolute, views)
    if found[0] is None:  # a link may lead into a mount
        found = _below(Path(os.path.realpath(path)), views)
    return found


def _below(path: Path, views: Views) -> tuple[Path | None, str]:
    for seen_at in sorted(views, key=lambda place: len(place.parts), reverse=True):
        if path.is_relative_to(seen_at):
            place, above = views[seen_at]
            below = str(path.relative_to(seen_at))
            return place, _joined(above, "" if below == "." else below)
    return None, ""


def _joined(above: str, below: str) -> str:
    if "://" in below:
        return below  # a URL at the source
    return "/".join(filter(None, (above, below)))


def _relative(path: str) -> str:
    if path.startswith("/"):
        raise _nowhere(path)
    if "://" in path:
        return path  # a URL, which the daemon compares with its source
    below = os.path.normpath(path)
    if below == ".." or below.startswith("../"):
        raise UsageError(f"{path} leads out of the mount")
    return "" if below == "." else below


def _nowhere(path: str) -> CachefsError:
    """Return the error for a path that lies in no mount of this user."""
    mount = _out_of_reach(path)
    if mount is not None:
        where = f"{path} lies in the cachefs mount {mount.mountpoint}"
        return MountError(f"{where}, but {why_out_of_reach(mount)}")
    return UsageError(f"{path} lies in no mount of cachefs; cachefs status shows what is")
