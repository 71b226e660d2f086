"""`cachefs node-report` tells a scheduler how much of each data set this node has cached."""

import json
import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from cachefs.cli import debug_option
from cachefs.cli.nodes.labels import PREFIX, STEP, changes, checked_name, label_value, names_of
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.control.client import ask, stream
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import locate, report_dir, report_path

_HELP = f"""Print how many percent of each data set are cached here, as labels of a node.

A data set is a PATH in a mount; without PATHs each mount is one. The label is {PREFIX}NAME,
where NAME is the last part of the path. The value is the percentage of bytes, rounded down to a
multiple of {STEP}, so that it rarely changes; 100 means all.

The mount lists directories that it has never listed. Exits with 1 if a data set has no answer.
"""


class _DataSet(NamedTuple):
    """A data set: its name in the label, its path, and where the daemon has it."""

    name: str
    path: str
    mountpoint: Path
    inner: str


@click.command("node-report", help=_HELP)
@click.argument("paths", nargs=-1, metavar="[[NAME=]PATH...]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["labels", "json"]),
    default="labels",
    show_default=True,
    help="Print lines KEY=VALUE, as kubectl label takes them, or a JSON list with sizes.",
)
@click.option(
    "--apply",
    "node",
    metavar="NODE",
    help="Also set the labels of this Node of Kubernetes, with the service account of this pod.",
)
@debug_option
def command(paths: tuple[str, ...], form: str, node: str | None) -> int:
    data_sets = _named(paths) if paths else _mounts()
    rows: list[dict[str, Any]] = []
    failed = False
    for data_set in data_sets:
        try:
            rows.append(_row(data_set))
        except CachefsError as error:
            failed = True
            say(f"cachefs: {data_set.path}: {error}", err=True)
    if form == "json":
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            say(f"{row['label']}={row['value']}")
    if node is not None:
        from cachefs.cli.nodes.api_server import ApiServer

        server = ApiServer(node)
        wanted = {row["label"]: row["value"] for row in rows}
        if changed := changes(server.labels(), wanted, complete=not (failed or paths)):
            server.change_labels(changed)
    return int(failed)


def _mounts() -> list[_DataSet]:
    places = _places()
    names = names_of(places)
    return [_DataSet(names[place], str(place), place, "") for place in places]


def _places() -> list[Path]:
    """Return the mountpoints of the daemons that report. It needs only their sockets, so a pod can
    do without anything else. A socket that nobody listens on is left out."""
    found = []
    for path in sorted(report_dir().glob("*.sock")):
        with suppress(CachefsError):
            found.append(Path(str(ask(path)["mountpoint"])))
    return found


def _place_of(path: str, places: list[Path]) -> tuple[Path, str]:
    """Return the mountpoint in which a path lies, and the path below it. Raises `MountError`,
    `UsageError`."""
    absolute = Path(os.path.normpath(Path.cwd() / path))
    for place in sorted(places, key=lambda place: len(place.parts), reverse=True):
        if absolute.is_relative_to(place):
            below = absolute.relative_to(place)
            return place, "" if below == Path() else str(below)
    place, (inner,) = locate([path])
    return place, inner


def _named(texts: tuple[str, ...]) -> list[_DataSet]:
    """Return the data sets that a user names. Raises `UsageError`, `MountError`."""
    found: list[_DataSet] = []
    places = _places()
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = "", text
        place, inner = _place_of(path, places)
        name = checked_name(name) if name else names_of([place / inner])[place / inner]
        if name in (other.name for other in found):
            raise UsageError(f"two data sets have the name {name!r}; write NAME=PATH")
        found.append(_DataSet(name, path, place, inner))
    return found


def _row(data_set: _DataSet) -> dict[str, Any]:
    """Return the report about a data set. Raises `CachefsError`."""
    sums = _usage(data_set)
    return {
        "name": data_set.name,
        "path": data_set.path,
        "cached_bytes": sums["cached_bytes"],
        "size_bytes": sums["size_bytes"],
        "label": f"{PREFIX}{data_set.name}",
        "value": label_value(sums["cached_bytes"], sums["size_bytes"]),
    }


def _usage(data_set: _DataSet) -> dict[str, Any]:
    request = {"paths": [data_set.inner], "depth": 0}
    lines = stream(report_path(data_set.mountpoint), api.CACHE_USAGE, request)
    sums: dict[str, Any] | None = None
    with closing(lines):
        for line in lines:
            if "failure" in line:
                raise CachefsError(str(line["failure"]))
            sums = line
    if sums is None:
        raise CachefsError("the daemon has no answer")
    return sums
