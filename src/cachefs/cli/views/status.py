"""The table of all mounts, and the state of one mount, for `cachefs status`."""

import time
from typing import Any

from cachefs.cli.mounts.all_mounts import SERVING
from cachefs.cli.mounts.path_request import counted
from cachefs.cli.views.shared import print_shared
from cachefs.cli.views.tables import plain_table, stdout_console
from cachefs.cli.views.tiers import notices, print_tiers
from cachefs.halt_polling import advice
from cachefs.units import format_bytes, format_duration

_LONG = ("MOUNTPOINT", "SOURCE", "STATE")
_TITLES = (*_LONG, "PID", "UP", "CACHED", "HITS", "MISSES", "HIT RATIO", "GET/HEAD/LIST")
_ESSENTIAL = (*_LONG, "UP", "CACHED", "HIT RATIO")
_WIDE_COLUMNS = 110
"""The width of a terminal that shows all columns of the table."""


def print_all(rows: list[dict[str, Any]]) -> None:
    """Print a table of all mounts, with fewer columns in a narrow terminal, and hints."""
    console = stdout_console()
    shown = [title for title in _TITLES if console.width >= _WIDE_COLUMNS or title in _ESSENTIAL]
    titles = (title if title in _LONG else f">{title}" for title in shown)
    table = plain_table(*titles, folded=_LONG)
    for row in rows:
        cells = dict(zip(_TITLES, _cells(row), strict=True))
        table.add_row(*(cells[title] for title in shown))
    console.print(table)
    for row in rows:
        lines = notices(row) if row["state"] == SERVING else [row["problem"]]
        for line in filter(None, lines):
            console.print(f"{row['mountpoint']}: {line}", soft_wrap=True)
    if any(row["state"] == SERVING for row in rows) and (hint := advice()):
        console.print(f"hint: {hint}", soft_wrap=True)


def print_one(row: dict[str, Any]) -> None:
    """Print all columns of the table, one per line, and the tiers."""
    console = stdout_console()
    for title, cell in zip(_TITLES, _cells(row), strict=True):
        console.print(f"{title:<14} {cell}", soft_wrap=True)
    if row["state"] == SERVING:
        if "data_path" in row:
            console.print(f"{'DATA PATH':<14} {_data_path(row)}", soft_wrap=True)
        if row.get("passthrough", {}).get("wanted"):
            console.print(f"{'PASSTHROUGH':<14} {_passthrough(row['passthrough'])}", soft_wrap=True)
        console.print(f"{'EVICTION':<14} {row['policy']}")
        if row.get("metrics"):
            console.print(f"{'METRICS':<14} http://{row['metrics']}/metrics", soft_wrap=True)
        if row.get("unshown_keys"):
            console.print(f"{'NOT SHOWN':<14} {_unshown(row)}", soft_wrap=True)
        for title, line in _origin_lines(row):
            console.print(f"{title:<14} {line}", soft_wrap=True)
        for title, line in _write_lines(row.get("writes")):
            console.print(f"{title:<14} {line}", soft_wrap=True)
        for title, line in _error_lines(row.get("errors", [])):
            console.print(f"{title:<14} {line}", soft_wrap=True)
        if hint := advice():
            console.print(f"{'HINT':<14} {hint}", soft_wrap=True)
        if row.get("shared"):
            console.print()
            print_shared(console, row)
        console.print()
        print_tiers(console, row)
    elif row["problem"]:
        console.print(f"{'PROBLEM':<14} {row['problem']}", soft_wrap=True)


def _unshown(row: dict[str, Any]) -> str:
    """Return what the origin has and the mount leaves out."""
    links = row.get("unshown_links", 0)
    keys = row["unshown_keys"] - links
    parts = []
    if keys:
        parts.append(f"{counted(keys, 'key')} of the origin that can't be files")
    if links:
        parts.append(f"{counted(links, 'link')} out of the source")
    return f"{', '.join(parts)}; the log has examples"


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


def _passthrough(passthrough: dict[str, Any]) -> str:
    """Return whether the kernel reads whole files directly, or why not."""
    opens = counted(passthrough["opens"], "open")
    through = f"{passthrough['passed_through']} of {opens} went to the cache disk directly"
    obstacle = passthrough["obstacle"]
    if obstacle is None:
        return f"on: {through}"
    return f"not now: {obstacle}" + (f"; {through}" if passthrough["passed_through"] else "")


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


def _write_lines(writes: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return lines about unsent files and about what was sent, for a writable mount."""
    if writes is None:
        return []
    states = ", ".join(f"{count} {state}" for state, count in writes["states"].items() if count)
    size = format_bytes(writes["unsent_bytes"])
    unsent = f"{counted(writes['unsent_files'], 'file')}, {size}{f' ({states})' if states else ''}"
    used, most = (format_bytes(writes[f"spool_{name}"]) for name in ("bytes", "limit_bytes"))
    kinds = ("puts", "parts", "copies", "deletes", "uploads")
    requests = ", ".join(f"{writes[kind]} {kind}" for kind in kinds)
    return [
        ("UNSENT", unsent),
        ("SPOOL", f"{used} of {most} in {writes['spool']}"),
        ("SENT", f"{format_bytes(writes['sent_bytes'])}: {requests}, {writes['errors']} failed"),
    ]


def _error_lines(errors: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a line for each of the last kinds of errors that programs got."""
    lines = []
    for error in errors:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error["last_at"]))
        times = counted(error["count"], "time")
        last = f"the last {error['operation']} of {error['path']}: {error['text']}"
        lines.append(("LAST ERROR", f"{when} {error['errno']}, {times}, {last}"))
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
