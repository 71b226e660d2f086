"""Print tiers, in the same way for `cachefs status MOUNTPOINT` and `cachefs tier list`.

There are two tables, so that each fits 80 columns with a path of usual length.
"""

import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cachefs.cli.mounts.path_request import counted
from cachefs.cli.views.tables import plain_table
from cachefs.units import format_bytes, format_duration

HEALTHY = "normal"
IN_USE = "in use"
"""The state of a shared tier that is well."""

_STYLES = {HEALTHY: "", "unstable": "bold yellow", "down": "bold red"}
_NOTICES = {
    "unstable": "it gets no blocks, and reads go around it, until it has recovered",
    "down": "it is not used until it answers again",
}
_NEARLY_FULL = 0.9
_MOST_NOTICES = 3
_COUNTERS = ("hits", "evicted", "demoted", "promoted", "rejected", "verified")


def print_tiers(out: Console, report: dict[str, Any]) -> None:
    """Print the tiers of one mount's `control.report.StatusReport`."""
    tiers: list[dict[str, Any]] = report["tiers"]
    labels = short_names(tiers)
    out.print(_places(tiers, labels))
    out.print()
    out.print(_activity(tiers, labels))
    for label, tier in zip(labels, tiers, strict=True):
        if tier.get("pinned_bytes"):
            pinned, most = (format_bytes(tier[f"{key}_bytes"]) for key in ("pinned", "pin_limit"))
            out.print(f"{label}: {pinned} are pinned, of at most {most}")
    lines = notices(report)
    if lines:
        out.print()
    for line in lines:
        out.print(line, style="bold", soft_wrap=True)


def notices(report: dict[str, Any]) -> list[str]:
    """Return a line for each problem; an empty list if there is none."""
    lines = []
    health = report["origin_health"]
    if health["down_since"] is not None:
        lasts = format_duration(max(0.0, time.time() - health["down_since"]))
        lines.append(f"the origin is DOWN, for {lasts} now: {health['problem']}")
    if report.get("stale"):
        lasts = format_duration(max(0.0, time.time() - report["stale_since"]))
        lines.append(f"the origin does not answer: names are shown as last known, for {lasts} now")
    lines += _notices_of_writes(report.get("writes"))
    lines += _notices_of_shared(report.get("shared"))
    for tier in report["tiers"]:
        where = f"{tier['medium']} {tier['path']}"
        if tier["health"] != HEALTHY:
            health = tier["health"]
            lines.append(f"{where} is {health.upper()}: {_NOTICES.get(health, 'see the log')}")
        if tier["bad_slabs"]:
            lines.append(f"{where}: {tier['bad_slabs']} slab files were missing or damaged")
    return lines


def _notices_of_writes(writes: dict[str, Any] | None) -> list[str]:
    if writes is None:
        return []
    lines, states = [], writes["states"]
    if states["failed"]:
        lines.append(f"{counted(states['failed'], 'file')} could not be sent: see cachefs writes")
    if kept := states["conflict"] + states["held"]:
        waits = "waits" if kept == 1 else "wait"
        lines.append(f"{counted(kept, 'unsent file')} {waits} for you: see cachefs writes")
    if writes["spool_bytes"] > _NEARLY_FULL * writes["spool_limit_bytes"]:
        used, most = (format_bytes(writes[f"spool_{name}"]) for name in ("bytes", "limit_bytes"))
        lines.append(f"the spool is nearly full, so writes may have to wait: {used} of {most}")
    return lines


def _notices_of_shared(shared: dict[str, Any] | None) -> list[str]:
    if shared is None:
        return []
    lines = [f"the shared tier: {shared['problem']}"] if shared["problem"] else []
    members = shared["members"]
    out = [member for member in members if member["state"] == "out"]
    if shared["state"] == "no members" and not lines:
        lines.append(f"the shared tier has no members: see {shared['from']}")
    elif shared["state"] == "bypassed":
        lines.append("the shared tier is BYPASSED: blocks come from the origin")
    for member in out[:_MOST_NOTICES]:
        lines.append(f"{member['address']} of the shared tier is OUT: {member['problem']}")
    if len(out) > _MOST_NOTICES:
        lines.append(f"{len(out)} of {len(members)} members of the shared tier are OUT")
    return lines


def short_names(tiers: list[dict[str, Any]]) -> list[str]:
    """Return a short name for each tier: the medium, with a number if several tiers have it."""
    total = Counter(tier["medium"] for tier in tiers)
    seen: Counter[str] = Counter()
    labels = []
    for tier in tiers:
        medium = tier["medium"]
        seen[medium] += 1
        labels.append(medium if total[medium] == 1 else f"{medium}{seen[medium]}")
    return labels


def _places(tiers: list[dict[str, Any]], labels: list[str]) -> Table:
    places = plain_table("TIER", "PATH", "HEALTH", ">USED", ">HIGH/LOW", folded=("PATH",))
    for label, tier in zip(labels, tiers, strict=True):
        health = tier["health"]
        shown = health if health == HEALTHY else health.upper()
        places.add_row(
            label,
            tier["path"],
            Text(shown, style=_STYLES.get(health, "bold")),
            f"{format_bytes(tier['used_bytes'])} of {format_bytes(tier['quota_bytes'])}",
            f"{_percent(tier, 'high_bytes')}/{_percent(tier, 'low_bytes')}",
        )
    return places


def _activity(tiers: list[dict[str, Any]], labels: list[str]) -> Table:
    titles = (f">{title.upper()}" for title in (*_COUNTERS, "bad", "errors"))
    activity = plain_table("TIER", *titles)
    for label, tier in zip(labels, tiers, strict=True):
        counts = [_count(tier[name]) for name in _COUNTERS]
        errors = tier["read_errors"] + tier["write_errors"]
        activity.add_row(label, *counts, _trouble(tier["bad_blocks"]), _trouble(errors))
    return activity


def _percent(tier: dict[str, Any], name: str) -> str:
    whole_bytes = tier.get("capacity_bytes", tier["quota_bytes"])
    return f"{tier[name] / max(1, whole_bytes):.0%}"


def _count(number: int) -> str:
    """Return at most five characters for numbers up to a quadrillion; exact below 100,000."""
    if number < 100_000:
        return str(number)
    value, power = number / 1000, 0
    while value >= 999.5 and power < len("kMGT") - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{'kMGT'[power]}"


def _trouble(number: int) -> Text:
    return Text(_count(number), style="bold yellow" if number else "")
