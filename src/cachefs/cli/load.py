"""`cachefs load` loads files into the cache before they are read."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import click

from cachefs.cli import debug_option
from cachefs.cli.views.load import JOB_TIMEOUT_S, follow
from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import locate, socket_path
from cachefs.trusted_path import open_file

_PIECE_BYTES = 256 << 10
_FIELDS = ("include", "exclude", "pin", "jobs")
_MODES = {"metadata": "--metadata", "check": "--check", "dry-run": "--dry-run"}


class _Wanted(NamedTuple):
    """What a load job loads, and where. `fields` are the other fields of a `load.spec.LoadSpec`."""

    mountpoint: str | None
    paths: tuple[str, ...]
    list_file: str | None
    fields: dict[str, Any]


@click.command("load")
@click.argument("paths", nargs=-1, metavar="[PATH...]")
@click.option(
    "-f",
    "--files-from",
    "list_file",
    metavar="LIST",
    help="Also load the paths in the file LIST. It has one path per line, or one "
    "JSON object with a path per line. - is the standard input.",
)
@click.option("-m", "--mount", "mountpoint", metavar="MOUNTPOINT", help="The mount of the paths.")
@click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Load what the table [load] in this configuration file of a mount names. "
    "Its keys are paths, list, include, exclude, metadata, pin and jobs.",
)
@click.option(
    "--include",
    metavar="GLOB",
    multiple=True,
    help="Load only files that match, such as '*.jpg', 'train/*.jpg' or '*/train/*'. "
    "A pattern without / is compared with names. One with / is compared with "
    "the whole path from the root of the mount. * also matches /.",
)
@click.option(
    "--exclude",
    metavar="GLOB",
    multiple=True,
    help="Load no files that match, also if they match --include.",
)
@click.option("--metadata", is_flag=True, help="Load only names and attributes.")
@click.option("--check", is_flag=True, help="Fetch nothing, and check whether all of it is cached.")
@click.option("--dry-run", is_flag=True, help="Fetch nothing, and print what would be fetched.")
@click.option("--pin", is_flag=True, help="Pin the loaded files: they are not evicted until unpin.")
@click.option(
    "-j",
    "--jobs",
    metavar="N",
    type=click.IntRange(1, 256),
    help="Send this many requests at a time. [32, and 64 for a far origin]",
)
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Print the job's id and return. The daemon continues the job.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the job's report as JSON at the end.")
@debug_option
def command(
    paths: tuple[str, ...],
    list_file: str | None,
    mountpoint: str | None,
    config_file: Path | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    metadata: bool,
    check: bool,
    dry_run: bool,
    pin: bool,
    jobs: int | None,
    detach: bool,
    as_json: bool,
) -> int:
    """Load files, and all files below directories, into the cache.

    A PATH lies in a mount, or is relative to the only mount (or to --mount). The job asks the
    origin for the current files and fetches what is not cached yet. Readers have priority.

    At the end the job looks up everything in the cache again; the exit code is 0 only if all of it
    is cached.

    \b
      cachefs load /mnt/data/train
      cachefs load -f today.txt --pin
      cachefs load /mnt/data --metadata --detach
    """
    chosen = [name for name, on in zip(_MODES, (metadata, check, dry_run), strict=True) if on]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(_MODES[name] for name in chosen)} exclude each other")
    fields: dict[str, Any] = {"include": include, "exclude": exclude, "pin": pin, "jobs": jobs}
    fields["mode"] = chosen[0] if chosen else None
    fields = {name: value for name, value in fields.items() if value}
    wanted = _Wanted(mountpoint, paths, list_file, fields)
    if config_file is not None:
        wanted = _with_file(wanted, config_file)
    if not wanted.paths and wanted.list_file is None:
        raise UsageError("nothing to load is named; give paths, or a list with -f")
    place, inner = locate(wanted.paths, wanted.mountpoint)
    spec = {**wanted.fields, "paths": inner, "has_list": wanted.list_file is not None}
    job = _submit(socket_path(place), spec, wanted.list_file)
    if detach:
        click.echo(json.dumps(job) if as_json else job["id"])
        return 0
    return follow(place, job["id"], as_json)


def _with_file(asked: _Wanted, file: Path) -> _Wanted:
    """Add the parts of [load] in `file` that the command line does not give. Raises
    `UsageError`."""
    from cachefs.config import load_table_in, mountpoint_in, nearest

    table = load_table_in(file)
    known = {"paths", "list", "metadata", *_FIELDS}
    if unknown := sorted(set(table) - known):
        fix = nearest(unknown[0], known, f"known are {', '.join(sorted(known))}")
        raise UsageError(f'{file}: load: unknown key "{unknown[0]}"; {fix}')
    place = asked.mountpoint or str(mountpoint_in(file))
    paths, list_file = asked.paths, asked.list_file
    if not paths and list_file is None:
        paths, list_file = tuple(table.get("paths", ())), table.get("list")
        if not paths and list_file is None:
            raise UsageError(f"{file}: [load] names neither paths nor a list")
    fields = {name: value for name, value in table.items() if name in _FIELDS}
    if table.get("metadata"):
        fields["mode"] = "metadata"
    return _Wanted(place, paths, list_file, fields | asked.fields)


def _submit(socket: Path, fields: dict[str, Any], list_file: str | None) -> dict[str, Any]:
    if list_file is None:
        job = ask(socket, api.JOB_CREATE, fields, JOB_TIMEOUT_S)
    else:
        try:
            with _opened(list_file) as lines:
                job = ask(socket, api.JOB_CREATE, fields, JOB_TIMEOUT_S)
                for piece in _pieces(lines):
                    ask(socket, api.JOB_LIST, {"id": job["id"], "lines": piece}, JOB_TIMEOUT_S)
        except OSError as error:
            raise CachefsError(f"can't read the list {list_file}: {error.strerror}") from error
    return ask(socket, api.JOB_START, {"id": job["id"]}, JOB_TIMEOUT_S)


def _opened(list_file: str) -> IO[bytes]:
    if list_file == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return os.fdopen(open_file(list_file), "rb")


def _pieces(lines: IO[bytes]) -> Iterator[list[str]]:
    """Yield all lines of the list, in pieces of about `_PIECE_BYTES`."""
    while piece := lines.readlines(_PIECE_BYTES):
        yield [os.fsdecode(line.rstrip(b"\n")) for line in piece]
