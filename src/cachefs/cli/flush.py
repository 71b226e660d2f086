"""`cachefs flush` sends what is unsent, and waits for it."""

import json

import click

from cachefs.cli.mounts.path_request import PathRequest, counted, path_options
from cachefs.cli.output.text import say
from cachefs.cli.views.unsent import flushing
from cachefs.control import api
from cachefs.units import format_bytes


@click.command("flush")
@path_options
def command(paths: tuple[str, ...], mountpoint: str | None, as_json: bool) -> int:
    """Send to the source what was written to files, and to all files below directories, and wait
    until the source has it.

    A new file that was not closed yet is not sent; the command names it. Ctrl-C ends only
    the wait. The exit code is 1 if a file was not sent; cachefs writes shows why.
    """
    request = PathRequest(paths, mountpoint)
    with flushing() as show:
        done = show.follow(request.ask(api.WRITES_FLUSH))
    if as_json:
        click.echo(json.dumps(done))
    elif done["sent_files"]:
        size = format_bytes(done["sent_bytes"])
        say(f"sent {counted(done['sent_files'], 'file')} ({size})")
    elif not request.failed:
        say("nothing is unsent there")
    return int(request.failed)
