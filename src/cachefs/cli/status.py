"""`cachefs status` shows every mount of this machine, and the state of its cache."""

import json

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.all_mounts import SERVING, collect
from cachefs.cli.output.text import say
from cachefs.mounts import checked_mountpoint, not_mounted, served_on


@click.command("status")
@click.argument("mountpoint", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON list with one object per mount."
)
@debug_option
def command(mountpoint: str | None, as_json: bool) -> int:
    """Show all mounts, or the mount on MOUNTPOINT: source, cache, hits, requests to the origin.

    With MOUNTPOINT, also show its cache tiers. Counters begin at the start of the mount.

    The exit code is 1 if MOUNTPOINT is given and isn't served.
    """
    rows = collect()
    if mountpoint is not None:
        place = served_on(checked_mountpoint(mountpoint))
        rows = [row for row in rows if row["mountpoint"] == str(place)]
        if not rows:
            raise not_mounted(place)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        from cachefs.cli.views import status as view

        view.print_all(rows) if mountpoint is None else view.print_one(rows[0])
    else:
        say("nothing is mounted")
    return int(mountpoint is not None and rows[0]["state"] != SERVING)
