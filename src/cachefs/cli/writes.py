"""`cachefs writes` shows what was written and is not at the source yet, and what a user can do."""

import json
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from cachefs.cli import debug_option, json_option
from cachefs.cli.mounts.one_mount import live_mounts
from cachefs.cli.mounts.unsent import Unsent, left_in, spools_left, the_unsent, unsent_in
from cachefs.cli.output.text import say
from cachefs.cli.views.progress import waiting
from cachefs.control import api
from cachefs.control.client import ask, stream
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import locate, socket_path
from cachefs.staging.file_state import no_longer_here
from cachefs.units import format_bytes

_TIMEOUT_S = 30.0
_LIST = "ls"


class _Group(click.Group):
    """A group whose first command is the default."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [_LIST, *args]
        return super().parse_args(ctx, args)


mount_option = click.option(
    "-m", "--mount", "mountpoint", metavar="MOUNTPOINT", help="The mount of the file."
)
cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The first cache directory of a mount that has ended.",
)


@click.group("writes", cls=_Group)
def command() -> None:
    """Show files that were written and that the source does not have yet.

    \b
      cachefs writes [PATH]            all, or those at or below PATH
      cachefs writes save FILE TARGET  copy one to a local file
      cachefs writes send FILE         send one now
      cachefs writes drop FILE         drop one

    FILE is a path in a mount, or the ID that the list shows. A file waits for its next close
    (open), is sent soon (waiting), is being sent, or has failed and is tried again. It waits for
    you if the source has another version than the one that was changed (conflict), or if its
    bytes may not be complete (held).
    """


@command.command(_LIST, short_help="Show the unsent files.")
@click.argument("path", required=False)
@mount_option
@cache_dir_option
@json_option
@debug_option
def show(path: str | None, mountpoint: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Show the unsent files of all mounts, or those at or below PATH.

    Without PATH, the command also shows what mounts that have ended have left in cache directories
    in the default places. Name another one with --cache-dir. The next mount of the same source
    with the same cache directory sends these files.
    """
    if cache_dir is not None and path is not None:
        raise UsageError("name a path or --cache-dir, not both")
    if cache_dir is not None:
        found = {str(cache_dir): left_in(cache_dir)}
    elif path is not None or mountpoint is not None:
        place, (inner,) = locate([path or mountpoint or ""], mountpoint)
        found = {str(place): list(unsent_in(place, inner))}
    else:
        found = _everywhere()
    rows = [_shown(where, each) for where, some in found.items() for each in some]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        from cachefs.cli.views.unsent import print_unsent

        print_unsent(rows)
    else:
        say("nothing is unsent")


def _everywhere() -> dict[str, list[Unsent]]:
    """Return the unsent files by mountpoint or cache directory. Prints why one is missing."""
    found = {}
    for place in live_mounts():
        try:
            found[str(place)] = list(unsent_in(place))
        except CachefsError as error:
            say(f"cachefs: {place}: {error}", err=True)
    for directory in spools_left():
        found[str(directory)] = left_in(directory)
    return found


def _shown(where: str, each: Unsent) -> dict[str, Any]:
    path = each.row["path"]
    if each.place is not None:
        return {"mountpoint": where, **each.row, "path": str(each.place / path) if path else ""}
    return {"mountpoint": None, "cache_dir": where, **each.row}


@command.command("save", short_help="Copy an unsent file to a local file.")
@click.argument("file")
@click.argument("target", required=False)
@mount_option
@cache_dir_option
@debug_option
def save(file: str, target: str | None, mountpoint: str | None, cache_dir: Path | None) -> None:
    """Copy the content of the unsent FILE to the new local file TARGET, or into the directory
    TARGET. Without TARGET, print where the content is.

    FILE stays unsent. Where FILE was not written, its content is that of the version that was
    changed, if the cache or the source still has it.
    """
    from cachefs.cli.files.saved_content import save_content, target_of

    found = the_unsent(file, mountpoint, cache_dir)
    with closing(_content(found)) as lines:
        head = next(lines)
        if target is None:
            _print_place(head)
            return
        place = target_of(target, head["path"])
        with waiting(f"saving {format_bytes(head['size_bytes'])}"):
            save_content(place, Path(head["file"]), head["size_bytes"], lines)
    say(f"saved {format_bytes(head['size_bytes'])} to {place}")


def _content(found: Unsent) -> Generator[dict[str, Any], None, None]:
    """Yield the lines of `api.WRITES_CONTENT`. Raises `CachefsError`."""
    if found.place is not None:
        yield from stream(socket_path(found.place), api.WRITES_CONTENT, {"id": found.row["id"]})
        return
    left, size_bytes = found.left, found.row["size_bytes"]
    assert left is not None
    yield {
        "path": left.path,
        "size_bytes": size_bytes,
        "base_bytes": left.base_bytes,
        "freed_bytes": left.freed_bytes,
        "file": str(left.file),
    }
    if left.base_bytes:
        raise CachefsError(
            f"only parts of {left.path} were written, and the rest is at the source: mount that "
            "again, and save the file then"
        )
    if left.freed_bytes:
        raise no_longer_here(left.path, left.freed_bytes)
    yield {"offset": 0, "length": size_bytes, "source": "spool"}


def _print_place(head: dict[str, Any]) -> None:
    say(head["file"])
    if head["base_bytes"]:
        say(
            "cachefs: this file has only the written parts; with a TARGET, cachefs writes save "
            "adds the rest",
            err=True,
        )
    if head.get("freed_bytes"):
        say(
            f"cachefs: this file lacks its first {head['freed_bytes']} bytes, which only an upload "
            "at the source has: cachefs writes send completes it",
            err=True,
        )


@command.command("send", short_help="Send an unsent file now.")
@click.argument("file")
@click.option("--overwrite", is_flag=True, help="Replace the version that the source has.")
@mount_option
@debug_option
def send(file: str, overwrite: bool, mountpoint: str | None) -> None:
    """Send the unsent FILE now, also if it is held.

    If the source has another version than the one that was changed, FILE is sent only with
    --overwrite. That version is lost then.
    """
    found = the_unsent(file, mountpoint, None)
    assert found.place is not None
    arguments = {"id": found.row["id"], "overwrite": overwrite}
    with waiting(f"sending {format_bytes(found.row['size_bytes'])}"):
        for _ in stream(socket_path(found.place), api.WRITES_SEND, arguments):
            pass
    say(f"sent {_named(found)}")


@command.command("drop", short_help="Drop an unsent file.")
@click.argument("file")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before the file is dropped.")
@mount_option
@debug_option
def drop(file: str, yes: bool, mountpoint: str | None) -> None:
    """Drop what was written to the unsent FILE. Its bytes are lost.

    The command asks first. Without a terminal, it needs --yes.
    """
    found = the_unsent(file, mountpoint, None)
    assert found.place is not None
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("drop asks before it drops a file; add --yes if you are sure")
        click.confirm(f"drop {_named(found)}? Its bytes are lost", abort=True)
    ask(socket_path(found.place), api.WRITES_DROP, {"id": found.row["id"]}, _TIMEOUT_S)
    say(f"dropped {_named(found)}")


def _named(found: Unsent) -> str:
    row = found.row
    name = str(found.place / row["path"]) if found.place and row["path"] else f"file {row['id']}"
    return f"{name} ({format_bytes(row['size_bytes'])})"
