"""Print the shared tier, in the same way for `cachefs status MOUNTPOINT` and `cachefs shared`.

There are two tables, so that each fits 80 columns: what this mount knows of the members, and what
they say of themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cachefs.cli.mounts.path_request import counted
from cachefs.cli.output.text import shown
from cachefs.cli.views.short_numbers import short_bytes, short_count, short_share, short_time
from cachefs.cli.views.tables import plain_table
from cachefs.shared.inspection import Inspection
from cachefs.units import format_bytes, format_duration

IN_USE = "in use"

_MOST_TEXT = 500


def print_shared(
    out: Console, report: Mapping[str, Any], servers: Mapping[str, Inspection] | None = None
) -> None:
    """Print the shared tier of one mount's `control.report.StatusReport`; nothing if it has none.

    `servers` are the members by address, if they were asked. Then problems follow, too; otherwise
    they are among the notices of `print_tiers`.
    """
    shared = report.get("shared")
    if shared is None:
        return
    for title, line in _lines(shared):
        out.print(f"{title:<14} {line}", soft_wrap=True)
    if shared["members"]:
        out.print()
        out.print(_members(shared["members"]))
    if servers is None:
        return
    if servers:
        out.print()
        out.print(_servers(servers))
    problems = notices(shared, servers)
    if problems:
        out.print()
    for line in problems:
        out.print(line, style="bold", soft_wrap=True)


def notices(shared: Mapping[str, Any], servers: Mapping[str, Inspection]) -> list[str]:
    """Return a line for each problem; an empty list if there is none."""
    lines = []
    if shared["problem"]:
        lines.append(on_one_line(f"the shared tier: {shared['problem']}"))
    for member in shared["members"]:
        address = on_one_line(member["address"])
        found = servers.get(member["address"])
        if member["problem"]:
            lines.append(f"{address}: {on_one_line(member['problem'])}")
        if found is not None:
            lines += [f"{address}: {on_one_line(problem)}" for problem in found.problems]
    return lines


def all_well(servers: Sequence[Inspection]) -> str:
    """Return the line that says that nothing is wrong with members."""
    memory, disk = (
        format_bytes(sum(getattr(server, f"{what}_limit_bytes") or 0 for server in servers))
        for what in ("memory", "disk")
    )
    versions = sorted({str(server.version) for server in servers})
    members = counted(len(servers), "member")
    return (
        f"{members}, memcached {' and '.join(versions)}, with {disk} of disk and {memory} of "
        "memory: nothing is wrong"
    )


def on_one_line(text: object) -> str:
    """Return text of others as a terminal may show it: one line, without control characters."""
    return shown(" ".join(str(text)[:_MOST_TEXT].split()))


def _lines(shared: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = str(shared["state"])
    asked = shared["hits"] + shared["misses"]
    ratio = f", hit ratio {shared['hits'] / asked:.1%}" if asked else ""
    hits = f"{shared['hits']} ({format_bytes(shared['hit_bytes'])}), {shared['misses']} misses"
    stored = f"{counted(shared['stored_blocks'], 'block')} ({format_bytes(shared['stored_bytes'])})"
    lines = [
        ("SHARED TIER", on_one_line(state if state == IN_USE else state.upper())),
        ("MEMBERS", on_one_line(f"{len(shared['members'])} from {shared['from']}")),
        ("HITS", f"{hits}{ratio}; {shared['waited']} waited for others"),
        ("STORED", f"{stored}, {shared['dropped_blocks']} dropped"),
    ]
    if shared["share_kept"] < 1:
        share = short_share(shared["share_kept"])
        lines.append(("KEPT", f"{share} of the blocks, because it is smaller than the data"))
    if shared["bad_values"]:
        bad = counted(shared["bad_values"], "value")
        lines.append(("BAD VALUES", f"{bad} did not have the right checksum, and were not used"))
    return lines


def _members(members: Sequence[Mapping[str, Any]]) -> Table:
    titles = (">SHARE", ">HITS", ">MISSES", ">READ", ">STORED", ">FAILED", ">MEDIAN", ">P95")
    table = plain_table("MEMBER", "STATE", *titles, folded=("MEMBER",))
    for member in members:
        is_out = member["state"] != "in"
        state = on_one_line(member["state"])
        failures = member["failures"]
        table.add_row(
            on_one_line(member["address"]),
            Text(state.upper() if is_out else state, style="bold red" if is_out else ""),
            f"{member['share']:.1%}",
            short_count(member["hits"]),
            short_count(member["misses"]),
            short_bytes(member["hit_bytes"]),
            short_count(member["stored_blocks"]),
            Text(short_count(failures), style="bold yellow" if failures else ""),
            short_time(member["latency_s"]),
            short_time(member["latency_p95_s"]),
        )
    return table


def _servers(servers: Mapping[str, Inspection]) -> Table:
    titles = (">VERSION", ">UP", ">ITEMS", ">MEMORY", ">DISK", ">CLIENTS", ">EVICTED")
    table = plain_table("MEMBER", *titles, folded=("MEMBER",))
    for address, server in servers.items():
        evicted = server.evictions or 0
        items = server.items if server.disk_items is None else server.disk_items
        table.add_row(
            on_one_line(address),
            (server.version or "-")[:8],
            "-" if server.uptime_s is None else format_duration(server.uptime_s).split()[0],
            "-" if items is None else short_count(items),
            _used(server.memory_used_bytes, server.memory_limit_bytes),
            _used(server.disk_used_bytes, server.disk_limit_bytes),
            "-" if server.connections is None else short_count(server.connections),
            "-"
            if server.evictions is None
            else Text(short_count(evicted), style="bold yellow" if evicted else ""),
        )
    return table


def _used(used_bytes: int | None, limit_bytes: int | None) -> str:
    if used_bytes is None or limit_bytes is None:
        return "-"
    return f"{short_bytes(used_bytes)}/{short_bytes(limit_bytes)}"
