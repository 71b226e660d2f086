"""`cachefs unpin` makes pinned data evictable again."""

import json

import click

from cachefs.cli.mounts.path_request import PathRequest, counted, path_options
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.units import format_bytes


@click.command("unpin")
@path_options
def command(paths: tuple[str, ...], mountpoint: str | None, as_json: bool) -> int:
    """Let the cache evict files, and all files below directories, like all others again."""
    request = PathRequest(paths, mountpoint)
    sums = request.sums(api.CACHE_UNPIN)
    if as_json:
        click.echo(json.dumps(sums))
    elif sums:
        say(f"unpinned {format_bytes(sums['size_bytes'])} in {counted(sums['blocks'], 'block')}")
    if sums.get("stuck_blocks"):
        say(f"cachefs: {sums['stuck_blocks']} blocks are on a disk that does not answer", err=True)
    return int(bool(request.failed or sums.get("stuck_blocks")))
