"""`cachefs hint` sends the files that will be read, in order, so that the mount fetches them
before."""

from pathlib import Path
from typing import TextIO

import click

from cachefs.cli.output.text import say
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
    help="The file with the paths, one per line. The default is the standard input.",
)
def command(directory: Path, names: TextIO) -> None:
    """Send the mount at DIRECTORY the paths of the files that will be read, in order.

    Paths are relative to DIRECTORY, one per line. The mount fetches a window of them ahead of the
    readers, and takes more paths as the files are read. This command ends when the mount has taken
    all paths. See docs/HINTS.md.
    """
    paths = (line.rstrip("\n") for line in names)
    wanted = [path for path in paths if path]
    with Hints(directory) as hints:
        sent = hints.send(wanted)
    if sent + hints.refused_count < len(wanted):
        raise UsageError(f"{directory} takes no hints: it is no cachefs mount, or an older one")
    say(f"{sent} paths were taken", err=True)
    if hints.first_refused is not None:
        path, why = hints.first_refused
        raise UsageError(
            f"{directory} refused {hints.refused_count} paths, the first of them {path!r} ({why}): "
            "correct or remove them"
        )
