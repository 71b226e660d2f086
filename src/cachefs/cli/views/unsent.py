"""Show unsent files: the table of `cachefs writes`, and the progress of their sending."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cachefs.cli.mounts.path_request import counted
from cachefs.cli.views.progress import telling
from cachefs.units import format_bytes, format_duration


def print_unsent(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of unsent files, and a line for each that waits for a retry or a user. A row
    is a line of `api.WRITES` with the whole path as `path`."""
    from cachefs.cli.views.tables import plain_table, stdout_console

    console = stdout_console()
    table = plain_table(">ID", "STATE", ">SIZE", ">AGE", "PATH", folded=("PATH",))
    for row in rows:
        age = format_duration(max(0, int(time.time() - row["changed_at"])))
        path = row["path"] or "(its name is not known)"
        table.add_row(str(row["id"]), _state(row), format_bytes(row["size_bytes"]), age, path)
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['id']}: {row['reason']}{_next_try(row)}", soft_wrap=True)
    if any(row["state"] in ("conflict", "held") for row in rows):
        console.print(
            "conflict and held files wait for you: cachefs writes send, save or drop ID",
            soft_wrap=True,
        )


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "sending" and row["sent_bytes"]:
        return f"sending, {format_bytes(row['sent_bytes'])} sent"
    return str(row["state"])


def _next_try(row: dict[str, Any]) -> str:
    if row["state"] != "failed":
        return ""
    if row["next_try_s"] is None:
        return "; it is tried again"
    return f"; it is tried again in {format_duration(round(row['next_try_s']))}"


class FlushView:
    """Shows how far a flush is."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def follow(self, lines: Iterator[tuple[str, dict[str, Any]]]) -> dict[str, int]:
        """Show the lines of `api.WRITES_FLUSH` until they end. Return the sums over all paths."""
        last: dict[str, dict[str, int]] = {}
        for path, line in lines:
            last[path] = line
            if line["left_files"]:
                self._tell(
                    f"sending {counted(line['left_files'], 'file')}, "
                    f"{format_bytes(line['left_bytes'])} left"
                )
        sums = dict.fromkeys(("sent_files", "sent_bytes", "left_files", "left_bytes"), 0)
        for line in last.values():
            for name in sums:
                sums[name] += line[name]
        return sums


@contextmanager
def flushing() -> Iterator[FlushView]:
    """Yield what shows the progress of a flush, if stderr is a terminal."""
    with telling("looking for unsent files") as tell:
        yield FlushView(tell)
