"""The mounts of this machine, as their runtime files, the kernel and their daemons describe
them."""

from pathlib import Path
from typing import Any

from cachefs.control.client import ask
from cachefs.errors import CachefsError
from cachefs.mounts import (
    MountHealth,
    RuntimeEntry,
    cachefs_mounts,
    check_answers,
    entry_of,
    read_entries,
    remove_leftovers,
    socket_path,
)

SERVING = "serving"
STARTING = "starting"
STALE = "stale"
SILENT = "not answering"
FOREIGN = "another user's"

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
        mounts[place] = mount.source
    rows = [_describe(Path(place), mounts[place], entries.get(place)) for place in mounts]
    for place, entry in entries.items():
        if place not in mounts and entry.alive:
            rows.append(_row(place, entry.source, entry, STARTING, None))
        elif place not in mounts:
            remove_leftovers(Path(place))
    return sorted(rows, key=lambda row: str(row["mountpoint"]))


def _describe(place: Path, source: str, entry: RuntimeEntry | None) -> dict[str, Any]:
    if entry is not None and entry.alive:
        try:
            return {"state": SERVING, **ask(socket_path(place))}
        except CachefsError as error:
            problem = str(error)
            if entry.supervised:
                problem += f"; its supervisor (process {entry.pid}) sees to it that one does"
            return _row(str(place), source, entry, SILENT, problem)
    if check_answers(place, _ANSWER_S) is MountHealth.DEAD:
        fix = f"its daemon is gone; unmount it with: cachefs umount {place}"
        return _row(str(place), source, None, STALE, fix)
    return _row(str(place), source, None, FOREIGN, "its daemon belongs to another user")


def _row(
    place: str, source: str, entry: RuntimeEntry | None, state: str, problem: str | None
) -> dict[str, Any]:
    pid = None if entry is None or entry.supervised else entry.pid
    supervisor_pid = None if entry is None or not entry.supervised else entry.pid
    return {
        "state": state,
        "mountpoint": place,
        "source": source,
        "pid": pid,
        "supervisor_pid": supervisor_pid,
        "problem": problem,
    }
