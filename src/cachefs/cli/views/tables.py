"""Make the tables that commands print, and the console that prints them."""

import sys
from collections.abc import Collection
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from cachefs.cli.output.text import shown

_PIPE_COLUMNS = 250


class _Console(Console):
    """A console that prints each text as `shown`, on one line."""

    def print(self, *objects: Any, **options: Any) -> None:
        """See `Console.print`."""
        super().print(*(_shown(item) for item in objects), **options)


class _Table(Table):
    """A table that shows the texts of its cells as `shown`."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """See `Table.add_row`."""
        super().add_row(*(_shown(cell) for cell in cells), **options)


def _shown(item: Any) -> Any:
    return shown(item) if isinstance(item, str) else item


def stdout_console() -> Console:
    """Make a console of the terminal's width, or of `_PIPE_COLUMNS` if stdout is no terminal."""
    wide = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return _Console(width=wide, markup=False, highlight=False, emoji=False)


def plain_table(*titles: str, folded: Collection[str] = ()) -> Table:
    """Make a table without borders, like the output of the other commands.

    A title that begins with ">" is the title of a column that is aligned right. A long text takes
    several lines in the columns of `folded`, and one line in all others.
    """
    table = _Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(
            title.removeprefix(">"),
            justify="right" if title.startswith(">") else "left",
            no_wrap=title not in folded,
            overflow="fold" if title in folded else "ellipsis",
        )
    return table
