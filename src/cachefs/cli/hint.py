"""`cachefs hint`: say which files will be read, in order, so that they come before that."""

import sys
from pathlib import Path
from typing import TextIO

import click

from cachefs.errors import UsageError
from cachefs_hints import Hints


@click.command("hint")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "-f",
    "--file",
    "names",
    type=click.File("r", encoding="utf-8", errors="surrogateescape"),
    default="-",
    help="Where the paths come from, one per line; by default standard input.",
)
def command(directory: Path, names: TextIO) -> None:
    """Tell the mount at DIRECTORY which files will be read, in order.

    Paths are given below DIRECTORY, one per line. The mount keeps a window of them fetched ahead of
    the readers, and takes more as they are read: this command ends when all paths were taken. See
    docs/HINTS.md.
    """
    paths = (line.rstrip("\n") for line in names)
    wanted = [path for path in paths if path]
    with Hints(directory) as hints:
        sent = hints.send(wanted)
    if sent < len(wanted):
        raise UsageError(f"{directory} takes no hints: it is no cachefs mount, or an older one")
    click.echo(f"{sent} paths were taken", file=sys.stderr)
