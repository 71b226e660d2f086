"""`python -m bench` measures the figures that have bars, and writes a table, JSON and Markdown.

It starts its own S3 server on loopback, mounts through the command line, and leaves nothing behind
except bench/out. As root it also drops the kernel's page cache (of the whole machine). In a virtual
machine that allows it, it temporarily changes the halt polling of idle CPUs.
"""

import argparse
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the sandbox starts, nothing needs cleanup

from bench import sandbox

CASES = (
    "herd", "cached", "cold", "tls", "large", "directory", "load", "hdfs", "metadata", "far",
    "writes", "shared", "weights",
)  # fmt: skip
_ASKED = ("wire", "loaders")
"""Cases that run only if --only names them. A run with one of them may take twice as long."""
_FULL_S, _QUICK_S = 15 * 60, 4 * 60
_LAST_START = 0.85
"""No case starts after more than this share of the time limit."""


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, under 4 minutes")
    parser.add_argument(
        "--only",
        action="append",
        choices=CASES + _ASKED,
        help="this case; may be given several times; only so: " + ", ".join(_ASKED),
    )
    parser.add_argument(
        "--base", type=Path, metavar="DIR",
        help="another work tree of cachefs, with its compiled parts, that `wire` compares with",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("out"), help="where results go"
    )
    arguments = parser.parse_args()

    from cachefs.halt_polling import halt_poll_ns

    as_found = halt_poll_ns()
    sandbox.run("bench", lambda directory: _work(directory, arguments), _restorer(as_found))


def _restorer(poll_ns: int | None) -> Callable[[], None]:
    def restore() -> None:
        from bench import machine

        machine.set_halt_poll(poll_ns)

    return restore


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import machine, rig
    from bench.case import FULL, QUICK, Bench
    from bench.report import print_report, write

    limit_s = _QUICK_S if arguments.quick else _FULL_S
    if set(_ASKED).intersection(arguments.only or ()):
        limit_s *= 2
    began = time.monotonic()
    console = Console(highlight=False)
    description = machine.describe(directory)

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {text}", soft_wrap=True)

    def on_alarm(number: int, frame: object) -> None:
        console.print(f"bench: stopped, because it took more than {limit_s + 60} s")
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # the sandbox also cleans up after this signal

    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(limit_s + 60)
    rows = []
    with rig.server(directory / "server") as server:
        scale = QUICK if arguments.quick else FULL
        bench = Bench(directory, server, scale, say, server.store(), began + limit_s)
        for name, case in _cases(arguments.only, arguments.base):
            if time.monotonic() - began > limit_s * _LAST_START:
                say(f"{name}: skipped, the time is over")
                continue
            rows += case(bench)
    print_report(console, description, rows)
    settings = {
        "quick": arguments.quick,
        "only": arguments.only,
        "seconds": round(time.monotonic() - began, 1),
        "page_cache_dropped": rig.can_drop_caches(),
    }
    for path in write(arguments.out, description, settings, rows):
        console.print(f"wrote {path}", soft_wrap=True)
    if not rig.can_drop_caches():
        console.print("the figures with the page cache dropped need root; they are left out")
    return int(arguments.strict and any(row.passed is False for row in rows))


def _cases(only: list[str] | None, base: Path | None) -> list[tuple[str, Callable[..., Any]]]:
    from functools import partial

    from bench import (
        hdfs,
        large_directory,
        large_file,
        load,
        metadata,
        small_files,
        weights,
        wire,
        writes,
    )
    from bench.far import case as far
    from bench.loaders import case as loaders
    from bench.shared import case as shared

    cases: dict[str, Callable[..., Any]] = {
        "herd": small_files.herd,
        "cached": small_files.cached,
        "cold": small_files.cold,
        "tls": small_files.tls,
        "large": large_file.large_file,
        "directory": large_directory.large_directory,
        "load": load.load,
        "hdfs": hdfs.hdfs,
        "metadata": metadata.metadata,
        "far": far.far_origin,
        "writes": writes.writes,
        "shared": shared.shared_tier,
        "wire": partial(wire.wire, base=base and base.resolve()),
        "weights": weights.weights,
        "loaders": loaders.loaders,
    }
    return [(name, cases[name]) for name in only or CASES]


if __name__ == "__main__":
    main()
