"""`cachefs evict` drops files from the cache at once."""

import json

import click

from cachefs.cli.mounts.path_request import PathRequest, counted, path_options
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.units import format_bytes


@click.command("evict")
@path_options
@click.option("--force", is_flag=True, help="Also drop pinned files.")
@click.option("--dry-run", is_flag=True, help="Only print what would be dropped.")
def command(
    paths: tuple[str, ...],
    mountpoint: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Drop files, and all files below directories, from all tiers of the cache.

    The files stay visible, and a read fetches them again. The kernel keeps its cached pages of
    them. The command sends no request to the origin.
    """
    request = PathRequest(paths, mountpoint)
    sums = request.sums(api.CACHE_EVICT, force=force, dry_run=dry_run)
    if as_json:
        click.echo(json.dumps(sums))
    elif sums:
        verb = "would evict" if dry_run else "evicted"
        say(f"{verb} {format_bytes(sums['size_bytes'])} in {counted(sums['blocks'], 'block')}")
        if sums["pinned_blocks"]:
            pinned = format_bytes(sums["pinned_bytes"])
            say(f"{pinned} are pinned and stay; cachefs unpin them, or add --force", err=True)
        if sums["stuck_blocks"]:
            say(f"{sums['stuck_blocks']} blocks stay on a disk that does not answer", err=True)
    return int(bool(request.failed or sums.get("stuck_blocks")))
