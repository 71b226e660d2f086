"""`cachefs du` shows how much of each directory is cached."""

import json
from typing import Any

import click

from cachefs.cli.mounts.path_request import PathRequest, counted, joined, path_options
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.units import format_bytes

_HEADS = ("cached", "of", "files", "of")


@click.command("du")
@path_options
@click.option(
    "-d",
    "--max-depth",
    "depth",
    metavar="DEPTH",
    type=click.IntRange(min=0),
    help="Show directories down to this many levels below a PATH.",
)
@click.option(
    "-s", "--summarize", is_flag=True, help="Show only the sum for each PATH, as -d 0 does."
)
@click.option("-b", "--bytes", "in_bytes", is_flag=True, help="Print sizes in bytes.")
def command(
    paths: tuple[str, ...],
    mountpoint: str | None,
    depth: int | None,
    summarize: bool,
    in_bytes: bool,
    as_json: bool,
) -> int:
    """Show for each directory at or below the PATHs how much of it is cached: cached bytes, all
    bytes, completely cached files, all files.

    The mount lists directories that it has never listed; for others it uses the last listing.
    It also counts the keys below each PATH that can't be shown as files, such as a key with an
    empty part. --json prints one object per line.
    """
    request = PathRequest(paths, mountpoint)
    if not as_json:
        say(_row(_HEADS, "path"))
    arguments: dict[str, object] = {}
    if summarize or depth is not None:
        arguments["depth"] = 0 if summarize else depth
    for path, line in request.ask(api.CACHE_USAGE, **arguments):
        place = joined(path, line.pop("path"))
        if as_json:
            click.echo(json.dumps({"path": place, **line}))
        else:
            say(_row(_cells(line, in_bytes), place))
            if place == path and (unshown := line.get("unshown_keys")):
                keys = counted(unshown, "key")
                say(
                    f"cachefs: {place}: {keys} can't be shown as files; the log has examples",
                    err=True,
                )
    return int(request.failed)


def _cells(line: dict[str, Any], in_bytes: bool) -> tuple[str, ...]:
    sizes = line["cached_bytes"], line["size_bytes"]
    cached, total = map(str if in_bytes else format_bytes, sizes)
    return cached, total, str(line["cached_files"]), str(line["files"])


def _row(cells: tuple[str, ...], path: str) -> str:
    cached, total, cached_files, files = cells
    return f"{cached:>10} {total:>10} {cached_files:>8} {files:>8}  {path}"
