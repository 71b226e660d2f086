"""`cachefs pin` protects cached data from eviction."""

import json
import shlex

import click

from cachefs.cli.mounts.path_request import PathRequest, counted, path_options
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.units import format_bytes

_SHOWN_PATHS = 3


@click.command("pin")
@path_options
def command(paths: tuple[str, ...], mountpoint: str | None, as_json: bool) -> int:
    """Keep files, and all files below directories, from being evicted, until unpin.

    The command pins only data that is cached now; cachefs load --pin fetches the rest. Pins
    survive restarts and hold for these versions of the files. The mount's --pin-limit gives the
    share of a tier that may be pinned; if there is more to pin, nothing is pinned.
    """
    request = PathRequest(paths, mountpoint)
    sums = request.sums(api.CACHE_PIN)
    if as_json:
        click.echo(json.dumps(sums))
    elif sums:
        size_bytes, pinned_bytes = sums["size_bytes"], sums["pinned_bytes"]
        of = f"{format_bytes(pinned_bytes)} of {format_bytes(size_bytes)}"
        say(f"pinned {of} in {counted(sums['files'], 'file')}")
        missing_bytes = size_bytes - pinned_bytes - sums["refused_bytes"]
        if missing_bytes > 0:
            shown = " ".join(map(shlex.quote, paths[:_SHOWN_PATHS]))
            more = " ..." if len(paths) > _SHOWN_PATHS else ""
            say(
                f"{format_bytes(missing_bytes)} are not cached; to fetch and pin them: "
                f"cachefs load --pin {shown}{more}",
                err=True,
            )
    refused_bytes = sums.get("refused_bytes", 0)
    if refused_bytes:
        say(
            f"cachefs: {format_bytes(refused_bytes)} could not be pinned: the limit is reached "
            "(--pin-limit)",
            err=True,
        )
    return int(bool(request.failed or refused_bytes))
