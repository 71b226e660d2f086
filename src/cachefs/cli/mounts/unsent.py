"""Find unsent files: in running mounts, and in the spools of mounts that have ended."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from cachefs.cli.mounts.one_mount import live_mounts, the_mount
from cachefs.control import api
from cachefs.control.client import stream
from cachefs.errors import CachefsError, SpoolError, UsageError
from cachefs.format.paths import TierPaths
from cachefs.mounts import locate, socket_path
from cachefs.staging.file_state import FileState
from cachefs.writes.unsent.leftover import LeftFile, read_spool, spool_exists

_ANSWER_S = 5.0
_LEFT_STATES = {
    FileState.OPEN: "waiting",
    FileState.FAILED: "failed",
    FileState.CONFLICT: "conflict",
    FileState.HELD: "held",
}


class Unsent(NamedTuple):
    """An unsent file. `row` is a line of `api.WRITES`; its `path` is below the mountpoint `place`,
    or below the source of a mount that has ended (`place` is None, and `left` is the file)."""

    row: dict[str, Any]
    place: Path | None
    left: LeftFile | None = None


def unsent_in(place: Path, below: str = "") -> Iterator[Unsent]:
    """Yield the unsent files of a mount, at or below a path in it. Raises `CachefsError`."""
    lines = stream(socket_path(place), api.WRITES, {"below": below} if below else {})
    with closing(lines):
        next(lines)
        for row in lines:
            yield Unsent(row, place)


def spool_of(place: Path) -> Path | None:
    """Return the spool of a mount; None for a read-only one. Raises `CachefsError`, also after a
    few seconds without an answer."""
    lines = stream(socket_path(place), api.WRITES, {}, _ANSWER_S)
    with closing(lines):
        spool = next(lines)["spool"]
    return None if spool is None else Path(spool)


def left_in(cache_dir: Path) -> list[Unsent]:
    """Return the unsent files that a mount has left in its first cache directory, or in the spool
    itself. Raises `SpoolError` if there is no spool, or a daemon uses it."""
    root = TierPaths(cache_dir).spool
    if not spool_exists(root):
        root = cache_dir
    return [_left(file) for file in read_spool(root).files]


def _left(file: LeftFile) -> Unsent:
    row = {
        "id": file.number,
        "path": file.path,
        "state": _LEFT_STATES.get(file.state, "waiting"),
        "size_bytes": file.size_bytes,
        "sent_bytes": 0,
        "reason": file.reason or None,
        "changed_at": file.changed_at_ns / 1e9,
        "next_try_s": None,
    }
    return Unsent(row, None, file)


def spools_left() -> list[Path]:
    """Return the cache directories in the default places that have unsent files of mounts that
    have ended."""
    from cachefs.config import user_cache_home, user_mem_home

    found = []
    for home in (user_cache_home(), user_mem_home()):
        for directory in sorted(home.iterdir()) if home.is_dir() else ():
            root = TierPaths(directory).spool
            try:
                if spool_exists(root) and read_spool(root).files:
                    found.append(directory)
            except (SpoolError, OSError):
                continue  # in use, or another user's
    return found


def the_unsent(file: str, mountpoint: str | None, cache_dir: Path | None) -> Unsent:
    """Return the unsent file that a user means by a path or an id. Raises `UsageError` if there is
    none, or if several have this path."""
    is_id = file.isascii() and file.isdecimal()
    if cache_dir is not None:
        found = [each for each in left_in(cache_dir) if _is(each, file, is_id)]
    elif is_id:
        places = live_mounts() if mountpoint is None else [the_mount(mountpoint)]
        found = [each for place in places for each in _all_of(place) if _is(each, file, True)]
    else:
        place, (inner,) = locate([file], mountpoint)
        found = [each for each in unsent_in(place, inner) if each.row["path"] == inner]
    if not found:
        raise UsageError(f"{file}: there is no such unsent file; cachefs writes shows all")
    if len(found) > 1:
        raise UsageError(_which(file, found))
    return found[0]


def _is(each: Unsent, file: str, is_id: bool) -> bool:
    return bool(each.row["id"] == int(file) if is_id else each.row["path"] == file.strip("/"))


def _all_of(place: Path) -> Iterator[Unsent]:
    """Yield the unsent files of a mount; none of a mount that doesn't answer."""
    try:
        yield from unsent_in(place)
    except CachefsError:
        return


def _which(file: str, found: Iterable[Unsent]) -> str:
    found = list(found)
    places = {each.place for each in found}
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        return f"{file} is the id of files in {names}; add --mount MOUNTPOINT"
    ids = ", ".join(f"{each.row['id']} ({each.row['state']})" for each in found)
    return f"{file}: several unsent files have this path; name one by its id: {ids}"
