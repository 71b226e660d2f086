"""`cachefs stats` prints the activity of a mount, one line per interval."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.one_mount import the_mount, why_silent
from cachefs.cli.output.text import say
from cachefs.cli.views.rates import Rates, rates_between, take_sample
from cachefs.cli.views.short_numbers import short_bytes, short_count, short_share, short_time
from cachefs.errors import CachefsError

_WIDE_COLUMNS = 110
_MEDIA = ("MEM", "SSD", "HDD")
_OF_WRITES = ("SENT", "PUT", "UNS")
"""The columns that only writable mounts have."""
_OF_SHARED = "SHAR"
"""The column that only mounts with a shared tier have."""


class _Column(NamedTuple):
    title: str
    width: int
    show: Callable[[Rates], str]
    is_wide: bool = False


def _medium(medium: str) -> _Column:
    return _Column(medium, 4, lambda rates: short_bytes(rates.of_medium(medium)))


_COLUMNS = (
    _Column("TIME", 8, lambda r: time.strftime("%H:%M:%S", time.localtime(r.at)), True),
    _Column("READ", 4, lambda r: short_count(r.reads_per_s)),
    _Column("B/s", 4, lambda r: short_bytes(r.read_bytes_per_s)),
    *map(_medium, _MEDIA),
    _Column("SHAR", 4, lambda r: short_bytes(r.shared.bytes_per_s) if r.shared else "-"),
    _Column("ORIG", 4, lambda r: short_bytes(r.origin_bytes_per_s)),
    _Column("SENT", 4, lambda r: short_bytes(r.writes.sent_bytes_per_s) if r.writes else "-"),
    _Column("PUT", 4, lambda r: short_count(r.writes.puts_per_s) if r.writes else "-"),
    _Column("UNS", 4, lambda r: short_count(r.writes.unsent_files) if r.writes else "-"),
    _Column("HIT", 4, lambda r: short_share(r.hit_ratio)),
    _Column("P50", 5, lambda r: short_time(r.read_p50_s)),
    _Column("P99", 5, lambda r: short_time(r.read_p99_s)),
    _Column("LOOK", 4, lambda r: short_count(r.lookups_per_s)),
    _Column("WAIT", 4, lambda r: short_count(r.waiting), True),
    _Column("GET", 4, lambda r: short_count(r.origin_gets_per_s), True),
    _Column("HEAD", 4, lambda r: short_count(r.origin_heads_per_s), True),
    _Column("LIST", 4, lambda r: short_count(r.origin_lists_per_s), True),
    _Column("REQ", 4, lambda r: short_count(r.origin_requests_per_s)),
    _Column("ERR", 4, lambda r: short_count(r.origin_errors_per_s)),
    _Column("EVIC", 4, lambda r: short_count(r.evicted_per_s)),
    _Column("CPU", 4, lambda r: short_share(r.cpu_ratio)),
    _Column("RSS", 4, lambda r: "-" if r.rss_bytes is None else short_bytes(r.rss_bytes)),
)


@click.command("stats")
@click.argument("mountpoint", required=False)
@click.option(
    "-i",
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 86400),
    default=1.0,
    help="The interval between two lines, in seconds. [1]",
)
@click.option(
    "-n", "--count", metavar="COUNT", type=click.IntRange(1), help="End after this many lines."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@debug_option
def command(mountpoint: str | None, interval_s: float, count: int | None, as_json: bool) -> int:
    """Print each second a line about the activity of the mount on MOUNTPOINT, or of the only one.

    \b
      READ B/s           reads of the kernel, and bytes given to readers, per second
      MEM SSD HDD        bytes per second from the tiers of this node
      SHAR ORIG          bytes per second from the shared tier and from the origin
      SENT PUT UNS       of writable mounts: bytes, and objects and parts, sent per second; files
                         that are unsent now
      HIT                share of blocks that readers found in the cache
      P50 P99            approximate median and 99th percentile of read times
      LOOK               look-ups of names per second
      REQ ERR            requests to the origin, and those that failed, per second
      EVIC               blocks evicted per second
      CPU RSS            CPU and memory of the daemon; 100% is one CPU

    Reads that the kernel answers from its page cache are not included. Terminals of 110 columns
    also show the time, requests that wait now, and the requests to the origin by kind. k and M are
    powers of 1000 for counts; K, M and G are powers of 1024 for bytes.

    The exit code is 1 if the mount ends meanwhile.
    """
    place = the_mount(mountpoint)
    try:
        lines = _json_lines(place, interval_s) if as_json else _lines(place, interval_s)
        for number, line in enumerate(lines, 1):
            for part in line.splitlines():
                say(part)
            if number == count:
                break
    except KeyboardInterrupt:
        return 130  # Ctrl-C is the normal end, so print no message
    return 0


def _rates(place: Path, interval_s: float) -> Iterator[Rates]:
    before = take_sample(place)
    due = time.monotonic()
    while True:
        due += interval_s
        if due < time.monotonic():  # the answer took longer than an interval: skip lines
            due = time.monotonic() + interval_s
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            after = take_sample(place)
        except CachefsError as error:
            raise why_silent(place, error) from error
        yield rates_between(before, after)
        before = after


def _json_lines(place: Path, interval_s: float) -> Iterator[str]:
    for rates in _rates(place, interval_s):
        shown = asdict(rates)
        for part in ("writes", "shared"):
            if shown[part] is None:
                del shown[part]
        yield json.dumps({"mountpoint": str(place), **shown})


def _lines(place: Path, interval_s: float) -> Iterator[str]:
    """Yield the lines, with a header per screen; only one header if stdout is no terminal."""
    shown: list[_Column] = []
    room = 0.0
    for rates in _rates(place, interval_s):
        columns, height = _layout(rates)
        line = " ".join(f"{column.show(rates):>{column.width}}" for column in columns)
        if columns != shown or room < 1:
            line = " ".join(f"{column.title:>{column.width}}" for column in columns) + "\n" + line
            shown, room = columns, height - 2
        room -= 1
        yield line


def _layout(rates: Rates) -> tuple[list[_Column], float]:
    """Return the columns to show, and how many lines of them fit on the screen."""
    width = height = math.inf
    if sys.stdout.isatty():
        width, height = os.get_terminal_size(sys.stdout.fileno())
    is_wide = width >= _WIDE_COLUMNS
    absent = {*_MEDIA} - {tier.medium for tier in rates.tiers}
    if rates.writes is None:
        absent |= {*_OF_WRITES}
    if rates.shared is None:
        absent.add(_OF_SHARED)
    columns = [
        column
        for column in _COLUMNS
        if (is_wide or not column.is_wide) and column.title not in absent
    ]
    return columns, height
