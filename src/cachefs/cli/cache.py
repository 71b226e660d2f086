"""`cachefs cache` shows and removes cache directories on this machine, mounted or not."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import click

from cachefs.cache_dir.leftover import CacheInfo, find_caches, remove_cache
from cachefs.cli import debug_option
from cachefs.cli.output.text import say
from cachefs.config import user_cache_home, user_mem_home
from cachefs.errors import CacheDirError
from cachefs.units import format_bytes, format_duration


@click.group("cache", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show or remove cache directories, also those that no mount uses any more.

    \b
      cachefs cache ls
      cachefs cache rm /var/cache/cachefs/s3-old-0123abcd
    """


@command.command("ls", short_help="Show cache directories with their sources, sizes and last uses.")
@click.argument("directories", nargs=-1, metavar="[DIR...]", type=Path)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object for each.")
@debug_option
def show(directories: tuple[Path, ...], as_json: bool) -> None:
    """Show the cache directories DIR and those directly below DIR. Without DIR, show those in the
    default places, on disk and in memory.

    This finds a directory that was given with --cache-dir only if DIR names it or its parent.
    """
    places = [Path(os.path.abspath(path)) for path in directories]
    caches = find_caches(places or [user_cache_home(), user_mem_home()])
    caches.sort(key=lambda cache: -cache.used_at)
    if as_json:
        rows = [{**asdict(cache), "path": str(cache.path)} for cache in caches]
        click.echo(json.dumps(rows, indent=2))
    elif caches:
        _print(caches)
    else:
        where = " and ".join(map(str, places or [user_cache_home(), user_mem_home()]))
        say(f"there is no cache directory in {where}")


def _print(caches: list[CacheInfo]) -> None:
    from cachefs.cli.views.tables import plain_table, stdout_console

    folded = ("PATH", "SOURCE")
    table = plain_table(*folded, ">SIZE", ">LAST USED", ">BY", folded=folded)
    for cache in caches:
        age = format_duration(max(0.0, time.time() - cache.used_at))
        user = "-" if not cache.in_use else f"process {cache.pid}" if cache.pid else "a process"
        last = "now" if cache.in_use else f"{age} ago"
        table.add_row(str(cache.path), cache.source, format_bytes(cache.size_bytes), last, user)
    stdout_console().print(table)


@command.command("rm", short_help="Remove cache directories that no mount uses.")
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=Path)
@debug_option
def remove(directories: tuple[Path, ...]) -> int:
    """Remove the cache directories DIR with everything cached there. The data at the source stay.

    The command refuses a directory that a mount uses and one that is not a cache directory. It
    leaves files that do not belong to cachefs.
    """
    code = 0
    for directory in directories:
        path = Path(os.path.abspath(directory))
        try:
            info = remove_cache(path)
        except CacheDirError as error:
            say(f"cachefs: error: {error}", err=True)
            code = 1
            continue
        left = "; files of others were left there" if path.exists() else ""
        say(f"{path}: removed, {format_bytes(info.size_bytes)} of {info.source}{left}")
    return code
