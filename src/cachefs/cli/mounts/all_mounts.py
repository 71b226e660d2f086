"""The mounts of this machine, as their runtime files, the kernel and their daemons describe
them."""

from pathlib import Path
from typing import Any

from cachefs.control.client import ask
from cachefs.errors import CachefsError
from cachefs.mounts import (
    MountEntry,
    MountHealth,
    RuntimeEntry,
    cachefs_mounts,
    check_answers,
    entry_of,
    read_entries,
    remove_leftovers,
    socket_path,
    why_out_of_reach,
)

SERVING = "serving"
STARTING = "starting"
STALE = "stale"
SILENT = "not answering"
FOREIGN = "another user's"
UNKNOWN = "not known here"

_ANSWER_S = 2.0


def collect() -> list[dict[str, Any]]:
    """Return one object per mount: `state` and the daemon's report (`control.report`). Without a
    report, it has `mountpoint`, `source`, `pid` and `supervisor_pid` as far as they are known, and
    `problem`."""
    entries = {entry.mountpoint: entry for entry in read_entries()}
    mounts = {}
    for mount in cachefs_mounts():
        served = entry_of(mount, entries.values())
        place = str(mount.mountpoint) if served is None else served.mountpoint
        mounts[place] = mount
    rows = [_describe(place, mounts[place], entries.get(place)) for place in mounts]
    for place, entry in entries.items():
        if place not in mounts and entry.alive:
            rows.append(_not_seen(entry))
        elif place not in mounts:
            remove_leftovers(Path(place))
    return sorted(rows, key=lambda row: str(row["mountpoint"]))


def _describe(place: str, mount: MountEntry, entry: RuntimeEntry | None) -> dict[str, Any]:
    if entry is not None and entry.alive:
        return _ask(mount.source, entry)
    health = check_answers(Path(place), _ANSWER_S)
    if health is MountHealth.DEAD:
        state, problem = STALE, f"its daemon is gone; unmount it with: cachefs umount {place}"
    else:
        state = UNKNOWN if mount.other_user is None else FOREIGN
        problem = why_out_of_reach(mount)
    if health is MountHealth.HANGING:
        problem = f"it does not answer (a keeper may hold it), and {problem}"
    return _row(place, mount.source, None, state, problem)


def _not_seen(entry: RuntimeEntry) -> dict[str, Any]:
    """Describe a mount that the kernel does not show here: it is not mounted yet, or no longer, or
    not in this container."""
    if not entry.device:
        return _row(entry.mountpoint, entry.source, entry, STARTING, None)
    return _ask(entry.source, entry)


def _ask(source: str, entry: RuntimeEntry) -> dict[str, Any]:
    try:
        return {"state": SERVING, **ask(socket_path(Path(entry.mountpoint)))}
    except CachefsError as error:
        problem = str(error)
        if entry.supervised:
            problem += f"; its supervisor ({entry.who}) sees to it that one does"
        return _row(entry.mountpoint, source, entry, SILENT, problem)


def _row(
    place: str, source: str, entry: RuntimeEntry | None, state: str, problem: str | None
) -> dict[str, Any]:
    owner = None if entry is None or entry.is_elsewhere else entry.pid
    is_supervised = entry is not None and entry.supervised
    return {
        "state": state,
        "mountpoint": place,
        "source": source,
        "pid": None if is_supervised else owner,
        "supervisor_pid": owner if is_supervised else None,
        "problem": problem,
    }
