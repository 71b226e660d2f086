"""`cachefs refresh` asks the origin now whether files have changed."""

import json

import click

from cachefs.cli.mounts.path_request import PathRequest, path_options
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.units import format_bytes


@click.command("refresh")
@path_options
@click.option("--wait", is_flag=True, help="Wait if the origin does not answer.")
def command(paths: tuple[str, ...], mountpoint: str | None, wait: bool, as_json: bool) -> int:
    """Ask the origin now about files, and about all known names below directories.

    Changes become visible at once, without waiting for a TTL to end. The cache drops the data of
    files that are gone or replaced, pinned or not. Unchanged files keep their cached data. The
    command does not list directories that were never listed.
    """
    request = PathRequest(paths, mountpoint)
    sums = request.sums(api.CACHE_REFRESH, wait=wait)
    if as_json:
        click.echo(json.dumps(sums))
    elif sums:
        dropped = ""
        if sums["dropped_blocks"]:
            dropped = f"; dropped {format_bytes(sums['dropped_bytes'])} of old versions"
        say(
            f"{sums['changed']} changed, {sums['new']} new, {sums['gone']} gone, of "
            f"{sums['checked'] + sums['gone']} names{dropped}"
        )
    return int(request.failed)
