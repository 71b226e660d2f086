"""The results of a program: tables for people, bars with a verdict, and everything as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.report import show

Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that must be at least `at_least` or at most `at_most`."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def limit(self) -> str:
        if self.at_least is not None:
            return f">= {show_fine(self.at_least)}"
        return "" if self.at_most is None else f"<= {show_fine(self.at_most)}"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table whose first column is text and whose other columns are mostly figures."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


@dataclass(slots=True)
class Findings:
    grids: list[Grid] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def print(self, console: Console) -> None:
        for grid in self.grids:
            console.print(f"\n[bold]{escape(grid.title)}[/]", soft_wrap=True)
            console.print(_table(grid))
            if grid.note:
                console.print(f"[dim]{escape(grid.note)}[/]", soft_wrap=True)
        if self.bars:
            console.print("\n[bold]bars[/]")
            console.print(self._bar_table())
        met = sum(bar.passed for bar in self.bars)
        console.print(f"[bold]{met} of {len(self.bars)} bars met[/]")

    def _bar_table(self) -> Table:
        table = _empty_table(("", "figure", "bar", ""))
        for bar in self.bars:
            colour, word = ("green", "pass") if bar.passed else ("bold red", "miss")
            table.add_row(escape(bar.name), show_fine(bar.value), bar.limit, f"[{colour}]{word}[/]")
        return table

    def write(self, path: Path, machine: dict[str, Any], settings: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "machine": machine,
            "settings": settings,
            "bars": [asdict(bar) | {"passed": bar.passed} for bar in self.bars],
            "tables": [asdict(grid) for grid in self.grids],
        }
        path.write_text(json.dumps(document, indent=2) + "\n")


def show_fine(value: float) -> str:
    """Return a ratio with four digits, and a larger figure like `show`."""
    return f"{value:.4f}" if 0 < abs(value) < 2 and value != int(value) else show(value)


def _empty_table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(escape(name), justify="right" if number else "left", no_wrap=bool(number))
    return table


def _table(grid: Grid) -> Table:
    table = _empty_table(grid.columns)
    for row in grid.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return escape(cell) if isinstance(cell, str) else show_fine(cell)
