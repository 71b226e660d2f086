"""`cachefs profile` shows which requests were slow and which paths were hot during a period."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cachefs.cli import debug_option, json_option
from cachefs.cli.mounts.one_mount import the_mount, why_silent
from cachefs.cli.output.text import shown
from cachefs.cli.views.progress import waiting
from cachefs.cli.views.short_numbers import short_bytes, short_time
from cachefs.control import api
from cachefs.control.client import stream
from cachefs.errors import CachefsError, MountError
from cachefs.mounts import socket_path
from cachefs.units import format_bytes

_RANKS = {"requests": "MOST REQUESTS", "bytes": "MOST BYTES", "seconds": "MOST TIME"}


@click.command("profile")
@click.argument("mountpoint", required=False)
@click.option(
    "-w",
    "--window",
    "window_s",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    help="How long to watch, in seconds. [10]",
)
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1, 100),
    default=10,
    help="How many slow requests and hot paths to show. [10]",
)
@json_option
@debug_option
def command(mountpoint: str | None, window_s: float, top: int, as_json: bool) -> None:
    """Watch all requests to the mount on MOUNTPOINT, or to the only one, for a while.

    Then show the number and duration of each operation, the slowest requests, and the paths with
    most requests, bytes and time. The daemon collects data only during that time.

    Requests that the kernel answers from its caches are not included. A READ does not name the
    process that reads.
    """
    place = the_mount(mountpoint)
    arguments: dict[str, object] = {"seconds": window_s, "top": top}
    with waiting(f"watching for {window_s:g} s"):
        report = _asked(place, arguments)
    if as_json:
        click.echo(json.dumps({"mountpoint": str(place), **report}))
    else:
        _print(str(place), report)


def _asked(place: Path, arguments: dict[str, object]) -> dict[str, Any]:
    lines = stream(socket_path(place), api.PROFILE, arguments)
    try:
        with contextlib.closing(lines):
            return next(lines)
    except StopIteration:
        raise MountError(f"{place}: the mount has ended") from None
    except CachefsError as error:
        raise why_silent(place, error) from error


def _print(place: str, report: dict[str, Any]) -> None:
    from cachefs.cli.views.tables import plain_table, stdout_console

    out = stdout_console()
    for line in _summary(place, report):
        out.print(line, soft_wrap=True)
    if not report["requests"]:
        return
    operations = plain_table("OPERATION", "OUTCOME", ">COUNT", ">TOTAL", ">MEAN", ">P99", ">MAX")
    for row in report["operations"]:
        times = (row["seconds"], row["seconds"] / row["count"], row["p99_s"], row["max_s"])
        operations.add_row(
            row["operation"], row["outcome"], f"{row['count']:,}", *map(short_time, times)
        )
    slowest = plain_table(
        ">SLOWEST", "OPERATION", "OUTCOME", ">UID", ">PID", "PATH", folded=("PATH",)
    )
    for row in report["slowest"]:
        who = ("-" if row[name] is None else str(row[name]) for name in ("uid", "pid"))
        slowest.add_row(
            short_time(row["seconds"]), row["operation"], row["outcome"], *who, _place(row)
        )
    tables = [operations, slowest]
    for name, title in _RANKS.items():
        if report["hottest"][name]:
            tables.append(_hottest(title, report["hottest"][name]))
    for table in tables:
        out.print()
        out.print(table)
    missed = report["missed"]
    if missed["requests"]:
        out.print(
            f"\nThere were too many paths to count all: up to {missed['requests']:,} requests, "
            f"{format_bytes(missed['bytes'])} and {short_time(missed['seconds'])} of a path may "
            "be missing.",
            soft_wrap=True,
        )


def _summary(place: str, report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['requests']:,} requests in {report['seconds']:g} s on {place}"
    origin = report["origin"]
    sent = origin["gets"] + origin["heads"] + origin["lists"]
    yield (
        f"{sent:,} requests to the origin ({origin['gets']:,} GET, {origin['heads']:,} HEAD, "
        f"{origin['lists']:,} LIST), {format_bytes(origin['get_bytes'])}, "
        f"{origin['errors']:,} failed, {origin['retries']:,} sent again"
    )


def _hottest(title: str, rows: list[dict[str, Any]]) -> Any:
    from cachefs.cli.views.tables import plain_table

    paths = f"PATHS WITH {title}"
    table = plain_table(">REQUESTS", ">BYTES", ">TIME", paths, folded=(paths,))
    for row in rows:
        table.add_row(
            f"{row['requests']:,}",
            short_bytes(row["bytes"]),
            short_time(row["seconds"]),
            shown(row["path"]),
        )
    return table


def _place(row: dict[str, Any]) -> str:
    path = shown(row["path"])
    if row["offset"] is None:
        return path
    return f"{path} ({format_bytes(row['size_bytes'])} at {format_bytes(row['offset'])})"
