"""`cachefs check` verifies cache directories that no daemon uses, and repairs them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from cachefs.cache.check.directory import Report, check_directory
from cachefs.cli.output.text import say
from cachefs.errors import CachefsError
from cachefs.units import format_bytes


@click.command("check")
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=Path)
@click.option(
    "--repair",
    is_flag=True,
    help="Drop bad blocks, add blocks that an index has lost to it, and make a missing index.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def command(directories: tuple[Path, ...], repair: bool, debug: bool) -> int:
    """Verify the cache directories DIR: read every block and compare it with the index.

    The command reads all cached data. It refuses a directory that a daemon uses. Without --repair
    it changes nothing. The exit code is 1 if there were problems, repaired or not.
    """
    code = 0
    for directory in directories:
        try:
            with _progress_bar(str(directory)) as progress:
                report = check_directory(directory, repair, progress)
        except CachefsError as error:
            if debug:
                raise
            say(f"cachefs: error: {error}", err=True)
            code = 1
        else:
            _print(report)
            code = max(code, int(bool(report.counts)))
    return code


def _print(report: Report) -> None:
    held = f"{report.slabs} slabs, {report.blocks} blocks, {format_bytes(report.block_bytes)}"
    say(f"{report.path}: {held}: {_verdict(report)}")
    for problem, details in report.details.items():
        count = report.counts[problem]
        say(f"  {count} {problem.value}")
        for detail in details:
            say(f"    {detail}")
        if count > len(details):
            say(f"    and {count - len(details)} more")
    if report.recovered:
        say(f"  {report.recovered} blocks that the index had lost were taken in again")
    elif report.recoverable and not report.clean and not report.repaired:
        say(
            f"  {report.recoverable} blocks are known to the slabs alone, after a crash; "
            "the next mount or --repair takes them in"
        )
    for name in report.left if report.repaired else []:
        say(f"  {name} was left: remove it yourself if it is nothing of yours")


def _verdict(report: Report) -> str:
    problems = report.counts.total()
    found = f"{problems} problem{'s' if problems != 1 else ''}"
    if report.repaired:
        return f"{found} repaired" if problems else "repaired"
    if problems:
        return f"{found}; see cachefs check --repair"
    return "clean"


@contextlib.contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal and remove it at the end; show nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
