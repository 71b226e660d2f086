"""Print the figures, one `Row` each, as a table, and write them as JSON and as Markdown."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = ("figure", "cachefs", "", "unit", "ratio", "bar", "")
"""The third column's heading is the side that a case is compared with."""
_WIDTHS = (29, 7, 7, 7, 6, 8, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `passed` is None without a bar."""

    case: str
    figure: str
    unit: str
    cachefs: float
    reference: float | None = None
    against: str = ""
    ratio: float | None = None
    bar: str = ""
    passed: bool | None = None
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """The measured values by side, one per round."""

    @property
    def cells(self) -> tuple[str, ...]:
        reference = "" if self.reference is None else show(self.reference)
        ratio = "" if self.ratio is None else f"{self.ratio:.{2 if self.ratio >= 1 else 3}f}x"
        verdict = {True: "pass", False: "miss", None: ""}[self.passed]
        return (self.figure, show(self.cachefs), reference, self.unit, ratio, self.bar, verdict)


def ratio_row(
    case: str,
    figure: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    against: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Return a row with the medians of both sides, and the median of the ratios of each round."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    bar, passed = "", None
    if at_least is not None:
        bar, passed = f">= {at_least:g}x", ratio >= at_least
    elif at_most is not None:
        bar, passed = f"<= {at_most:g}x", ratio <= at_most
    return Row(
        case,
        figure,
        unit,
        statistics.median(ours),
        statistics.median(theirs),
        against,
        ratio,
        bar,
        passed,
        {"cachefs": list(ours), against: list(theirs)},
    )


def show(value: float) -> str:
    """Return the value with three digits, or with all digits before the point if they are more."""
    if value == int(value):
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def verdict(rows: Sequence[Row]) -> str:
    """Return how many bars were met."""
    judged = [row for row in rows if row.passed is not None]
    return f"{sum(bool(row.passed) for row in judged)} of {len(judged)} bars met"


def print_report(console: Console, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Print the machine, then the figures."""
    for line in _describe(machine):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    for case in dict.fromkeys(row.case for row in rows):
        console.print(f"\n[bold]{escape(case)}[/]", soft_wrap=True)
        console.print(_table([row for row in rows if row.case == case]))
    console.print(f"[bold]{verdict(rows)}[/]")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for number, (name, width) in enumerate(zip(_columns(rows), _WIDTHS, strict=True)):
        right = number in (1, 2, 4)
        table.add_column(name, justify="right" if right else "left", min_width=width)
    colours = {True: "green", False: "bold red", None: "default"}
    for row in rows:
        *cells, word = map(escape, row.cells)
        table.add_row(*cells, f"[{colours[row.passed]}]{word}[/]")
    return table


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    against = {row.against for row in rows if row.against}
    name = "" if not against else against.pop() if len(against) == 1 else "other"
    return (*COLUMNS[:2], name, *COLUMNS[3:])


def write(
    directory: Path, machine: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]
) -> list[Path]:
    """Write `results.json` and `results.md`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_text = directory / "results.json", directory / "results.md"
    as_json.write_text(
        json.dumps(
            {"machine": machine, "settings": settings, "rows": [asdict(row) for row in rows]},
            indent=2,
        )
        + "\n"
    )
    lines = ["# cachefs benchmark", "", *(f"- {line}" for line in _describe(machine)), ""]
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        lines += ["", f"## {case}", "", _markdown(_columns(of_case))]
        lines.append(_markdown(["---"] * len(COLUMNS)))
        lines += [_markdown(row.cells) for row in of_case]
    lines += ["", verdict(rows), ""]
    as_text.write_text("\n".join(lines))
    return [as_json, as_text]


def _describe(machine: dict[str, Any]) -> list[str]:
    lines = [
        "{cpu}, {cores} cores, {memory_gib} GiB; virtualisation: {virtualisation}",
        "{system}, Linux {kernel}; cache on {cache_file_system}; load before: {load_before}",
        "cachefs {cachefs} ({commit}), Python {python}, pyfuse3 {pyfuse3}, libfuse {libfuse}",
        "obstore {obstore}, SeaweedFS {seaweedfs}",
    ]
    found = [line.format(**machine) for line in lines]
    as_found = machine["guest_halt_poll_ns_as_found"]
    if as_found is not None:
        found.append(
            f"as found: guest_halt_poll_ns = {as_found}, so each wake-up of an idle virtual CPU "
            "waits for the hypervisor (some 50 us). Polling: 200 us, as bare metal or idle=poll "
            "would behave"
        )
    return found


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
