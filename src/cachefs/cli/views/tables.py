"""Make the tables that commands print, and the console that prints them."""

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table

_PIPE_COLUMNS = 250


def stdout_console() -> Console:
    """Make a console of the terminal's width, or of `_PIPE_COLUMNS` if stdout is no terminal."""
    wide = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(width=wide, markup=False, highlight=False, emoji=False)


def plain_table(*titles: str, folded: Collection[str] = ()) -> Table:
    """Make a table without borders, like the output of the other commands.

    A title that begins with ">" is the title of a column that is aligned right. A long text takes
    several lines in the columns of `folded`, and one line in all others.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(
            title.removeprefix(">"),
            justify="right" if title.startswith(">") else "left",
            no_wrap=title not in folded,
            overflow="fold" if title in folded else "ellipsis",
        )
    return table
