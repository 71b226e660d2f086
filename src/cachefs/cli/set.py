"""`cachefs set`: limits and the access log of a running mount."""

from pathlib import Path
from typing import Any

import click

from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.mounts import find_entry, served_on, socket_path
from cachefs.units import format_bytes

_TIMEOUT_S = 10.0
_KEEP = "until the mount ends; to keep it so, change the mount's options too"
_HERE_ONLY = {"access_log"}
"""What is no option of `cachefs mount`."""


@click.command("set")
@click.argument("mountpoint")
@click.argument("settings", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def command(mountpoint: str, settings: tuple[str, ...], debug: bool) -> None:
    """Change limits of the mount on MOUNTPOINT, or log its requests, until it ends.

    \b
      max-downloads=N            most requests to the origin at one time
      download-limit=SIZE        most bytes per second to read from the origin; 0 for no limit
      limit-uid=UID=SIZE         most bytes per second for the readers of a user; 0 for no limit
      access-log=FILE|off        one line for each request of the kernel, in a file of this host

    A user's limit holds for the files that he has open, too.
    """
    arguments = parse_settings(settings)
    if not mountpoint or "\0" in mountpoint:
        raise UsageError("the mountpoint is empty; name a directory")
    place = served_on(Path(mountpoint))
    entry = find_entry(place)
    if entry is None or not entry.alive:
        raise MountError(f"{place} is not mounted by cachefs; cachefs status shows what is")
    try:
        reply = ask(socket_path(place), api.SET, arguments, _TIMEOUT_S)
    except CachefsError as error:
        raise CachefsError(f"{place}: {error}") from error
    for line in _describe(arguments, reply["before"], reply["after"]):
        click.echo(line)


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """From "name=value" to what the daemon is asked for, checked. Raises `UsageError`."""
    from cachefs.config import load_changes

    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise UsageError(f'"{setting}" is no setting; write NAME=VALUE')
        field = name.replace("-", "_")
        if field == "limit_uid":
            values.setdefault(field, []).append(value)
        elif field in values:
            raise UsageError(f"{name} is given twice")
        else:
            values[field] = value
    return load_changes(values).model_dump(exclude_unset=True)


def _describe(asked: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = []
    for field, value in asked.items():
        name = field.replace("_", "-")
        keep = "until the mount ends" if field in _HERE_ONLY else _KEEP
        if field == "limit_uid":
            for uid in map(str, value):
                was, is_ = (_rate(state[field].get(uid, 0)) for state in (before, after))
                lines.append(f"{name} of {uid} was {was} and is {is_} {keep}")
            continue
        show = _rate if field == "download_limit" else str
        lines.append(f"{name} was {show(before[field])} and is {show(after[field])} {keep}")
    return lines


def _rate(bytes_per_s: int) -> str:
    return f"{format_bytes(bytes_per_s)}/s" if bytes_per_s else "unlimited"
