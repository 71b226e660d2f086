"""The figures: one `Row` each, printed as a table, written as JSON and as Markdown."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = ("figure", "cachefs", "compared with", "ratio", "bar", "")
_WIDTHS = (20, 14, 18, 6, 9, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `passed` is None where there is no bar."""

    case: str
    figure: str
    cachefs: str
    reference: str = ""
    ratio: float | None = None
    bar: str = ""
    passed: bool | None = None
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """What was measured, by side, one value a round."""

    @property
    def cells(self) -> tuple[str, ...]:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        verdict = {True: "pass", False: "miss", None: ""}[self.passed]
        return (self.figure, self.cachefs, self.reference, ratio, self.bar, verdict)


def ratio_row(
    case: str,
    figure: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    label: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Medians of both sides, and the median of the ratios of each round."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    bar, passed = "", None
    if at_least is not None:
        bar, passed = f">= {at_least:g}x", ratio >= at_least
    elif at_most is not None:
        bar, passed = f"<= {at_most:g}x", ratio <= at_most
    return Row(
        case,
        figure,
        show(statistics.median(ours), unit),
        f"{show(statistics.median(theirs), unit)} {label}",
        ratio,
        bar,
        passed,
        {"cachefs": list(ours), label: list(theirs)},
    )


def show(value: float, unit: str) -> str:
    """With three digits or all of them."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def verdict(rows: Sequence[Row]) -> str:
    """How many bars were met."""
    judged = [row for row in rows if row.passed is not None]
    return f"{sum(bool(row.passed) for row in judged)} of {len(judged)} bars met"


def print_report(console: Console, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """The machine, then the figures."""
    for line in _describe(machine):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    for case in dict.fromkeys(row.case for row in rows):
        console.print(f"\n[bold]{escape(case)}[/]", soft_wrap=True)
        console.print(_table([row for row in rows if row.case == case]))
    console.print(f"[bold]{verdict(rows)}[/]")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for name, width in zip(COLUMNS, _WIDTHS, strict=True):
        right = name in ("cachefs", "ratio")
        table.add_column(name, justify="right" if right else "left", min_width=width)
    colours = {True: "green", False: "bold red", None: "default"}
    for row in rows:
        *cells, word = map(escape, row.cells)
        table.add_row(*cells, f"[{colours[row.passed]}]{word}[/]")
    return table


def write(
    directory: Path, machine: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]
) -> list[Path]:
    """`results.json` and `results.md`."""
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
    case = ""
    for row in rows:
        if row.case != case:
            case = row.case
            lines += ["", f"## {case}", "", _markdown(COLUMNS), _markdown(["---"] * len(COLUMNS))]
        lines.append(_markdown(row.cells))
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
