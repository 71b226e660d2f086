"""`cachefs status` shows every mount of this machine, and the state of its cache."""

import json
import time
from pathlib import Path
from typing import Any

import click

from cachefs.cli.cache_paths import counted
from cachefs.control.client import ask
from cachefs.errors import CachefsError, MountError
from cachefs.mounts import (
    Health,
    RuntimeEntry,
    cachefs_mounts,
    entry_of,
    probe,
    read_entries,
    remove_leftovers,
    served_on,
    socket_path,
)
from cachefs.units import format_bytes, format_duration

SERVING = "serving"
STARTING = "starting"
STALE = "stale"
SILENT = "not answering"
FOREIGN = "another user's"

_PROBE_S = 2.0

_LONG = ("MOUNTPOINT", "SOURCE", "STATE")
_TITLES = (*_LONG, "PID", "UP", "CACHED", "HITS", "MISSES", "HIT RATIO", "GET/HEAD/LIST")
_ESSENTIAL = (*_LONG, "UP", "CACHED", "HIT RATIO")
_WIDE_COLUMNS = 110
"""The width of a terminal that shows all columns of the table."""


@click.command("status")
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, one object per mount.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def command(mountpoint: str | None, as_json: bool, debug: bool) -> int:
    """Show all mounts, or the mount on MOUNTPOINT: source, cache, hits, requests to the origin.

    With MOUNTPOINT, also show its cache tiers. Counters begin at the start of the mount.

    The exit code is 1 if MOUNTPOINT is given and isn't served.
    """
    rows = collect()
    if mountpoint is not None:
        place = str(served_on(Path(mountpoint)))
        rows = [row for row in rows if row["mountpoint"] == place]
        if not rows:
            raise MountError(f"{place} is not mounted by cachefs; cachefs status shows what is")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif mountpoint is not None:
        _print_one(rows[0])
    elif rows:
        _print_all(rows)
    else:
        click.echo("nothing is mounted")
    return int(mountpoint is not None and rows[0]["state"] != SERVING)


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
    if probe(place, _PROBE_S) is Health.DEAD:
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


def _print_all(rows: list[dict[str, Any]]) -> None:
    """Print a table of all mounts, with fewer columns in a narrow terminal."""
    from cachefs.cli import tier_table

    console = tier_table.console()
    shown = [title for title in _TITLES if console.width >= _WIDE_COLUMNS or title in _ESSENTIAL]
    table = tier_table.table()
    for title in shown:
        if title in _LONG:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = dict(zip(_TITLES, _cells(row), strict=True))
        table.add_row(*(cells[title] for title in shown))
    console.print(table)
    for row in rows:
        lines = tier_table.notices(row) if row["state"] == SERVING else [row["problem"]]
        for line in filter(None, lines):
            console.print(f"{row['mountpoint']}: {line}", soft_wrap=True)


def _print_one(row: dict[str, Any]) -> None:
    """Print all columns of the table, one per line, and the tiers."""
    from cachefs.cli import tier_table

    console = tier_table.console()
    for title, cell in zip(_TITLES, _cells(row), strict=True):
        console.print(f"{title:<14} {cell}", soft_wrap=True)
    if row["state"] == SERVING:
        if "data_path" in row:
            console.print(f"{'DATA PATH':<14} {_data_path(row)}", soft_wrap=True)
        console.print(f"{'EVICTION':<14} {row['policy']}")
        if row.get("metrics"):
            console.print(f"{'METRICS':<14} http://{row['metrics']}/metrics", soft_wrap=True)
        if row.get("unshown_keys"):
            keys = counted(row["unshown_keys"], "key")
            console.print(
                f"{'NOT SHOWN':<14} {keys} of the origin that can't be files; the log has examples"
            )
        for title, line in _origin_lines(row):
            console.print(f"{title:<14} {line}", soft_wrap=True)
        console.print()
        tier_table.print_tiers(console, row)
    elif row["problem"]:
        console.print(f"{'PROBLEM':<14} {row['problem']}", soft_wrap=True)


def _data_path(row: dict[str, Any]) -> str:
    """Return which process answers the kernel, why, and how often the daemon was replaced."""
    path = row["data_path"]
    text = str(path["name"])
    if path["reason"]:
        text += f" ({path['reason']})"
    if row["supervisor_pid"] is not None:
        text += f", supervised by process {row['supervisor_pid']}"
    if path["restarts"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path["restarted_at"]))
        text += f"; {path['restarts']} restarts, the last at {when}: the daemon {path['last_end']}"
    return text


def _origin_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about the requests to the origin: their failures and their limits."""
    health, limits = row["origin_health"], row["limits"]
    most = limits["max_downloads"]
    held = f", held at {health['limit']} by its answers" if health["limit"] < most else ""
    trouble = f"{health['retries']} retried, {health['busy_answers']} times too busy"
    lines = [
        ("REQUESTS", f"{health['in_flight']} under way of at most {most}{held}"),
        ("TROUBLE", f"{trouble}, {health['failed_calls']} given up"),
    ]
    rates = {"all downloads": limits["download_limit"]}
    rates |= {f"uid {uid}": rate for uid, rate in limits["limit_uid"].items()}
    for who, bytes_per_s in rates.items():
        if bytes_per_s:
            lines.append(("LIMIT", f"{format_bytes(bytes_per_s)}/s for {who}"))
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    head = [str(row["mountpoint"]), str(row["source"]), str(row["state"])]
    pid = "-" if row.get("pid") is None else str(row["pid"])
    if row["state"] != SERVING:
        return [*head, pid, *["-"] * 6]
    cache, reads, origin = row["cache"], row["reads"], row["origin"]
    asked = reads["hits"] + reads["misses"]
    return [
        *head,
        pid,
        format_duration(max(0.0, time.time() - row["started_at"])),
        f"{format_bytes(cache['used_bytes'])} of {format_bytes(cache['capacity_bytes'])}",
        str(reads["hits"]),
        str(reads["misses"]),
        f"{reads['hits'] / asked:.1%}" if asked else "-",
        f"{origin['gets']}/{origin['heads']}/{origin['lists']}",
    ]
