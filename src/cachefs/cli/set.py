"""`cachefs set` changes options and the access log of a running mount."""

import math
from pathlib import Path
from typing import Any

import click

from cachefs.cli.output.text import say
from cachefs.config import LIVE, flags, load_changes
from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import find_entry, not_mounted, served_on, socket_path
from cachefs.units import format_bytes, format_duration

_TIMEOUT_S = 10.0
_KEEP = " until the mount ends; to keep it so, change the mount's options too"
_HERE_ONLY = {"access_log"}
"""Settings that are not options of `cachefs mount`."""
_SWITCHES = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def _help() -> str:
    names = [*(flags()[name].option.removeprefix("--") for name in LIVE), "access-log"]
    return f"""Change options of the mount on MOUNTPOINT, or log its requests, until it ends.

    NAME is one of {", ".join(sorted(names))}; they take what the options of cachefs mount take,
    switches true or false. limit-uid=UID=SIZE is for one user; access-log=FILE|off writes one line
    for each request of the kernel.

    A user's limit holds for the files that the user has open, too. What the kernel was told holds
    as long as it was told: to shorten a TTL at once, use cachefs refresh afterwards.

    \b
      cachefs set /mnt/data download-limit=100MiB/s
      cachefs set /mnt/data list-ttl=1m negative-ttl=10s readahead=0
    """


@click.command("set", help=_help())
@click.argument("mountpoint")
@click.argument("settings", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def command(mountpoint: str, settings: tuple[str, ...], debug: bool) -> None:
    """Run the command; `_help` returns its help text."""
    arguments = parse_settings(settings)
    if not mountpoint or "\0" in mountpoint:
        raise UsageError("the mountpoint is empty; name a directory")
    place = served_on(Path(mountpoint))
    entry = find_entry(place)
    if entry is None or not entry.alive:
        raise not_mounted(place)
    change(place, arguments, _KEEP)


def change(place: Path, arguments: dict[str, Any], keep: str) -> None:
    """Let the daemon apply `arguments`, and print the changes. Raises `CachefsError`."""
    plain = {
        name: "indefinite" if value == math.inf else value for name, value in arguments.items()
    }
    try:
        reply = ask(socket_path(place), api.SET, plain, _TIMEOUT_S)
    except CachefsError as error:
        raise CachefsError(f"{place}: {error}") from error
    for line in _describe(plain, reply["before"], reply["after"], keep):
        say(line)


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """Parse and check "name=value" settings. Return the arguments of the request to the daemon.

    Raises `UsageError`.
    """
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
            values[field] = _SWITCHES.get(value, value) if field in _switches() else value
    return load_changes(values)


def _switches() -> set[str]:
    return {name for name, flag in flags().items() if flag.metavar is None}


def _describe(
    asked: dict[str, Any], before: dict[str, Any], after: dict[str, Any], keep: str
) -> list[str]:
    lines = []
    for field, value in asked.items():
        name = field.replace("_", "-")
        how_long = " until the mount ends" if keep and field in _HERE_ONLY else keep
        if field == "limit_uid":
            for uid in map(str, value):
                was, is_ = (_rate(state[field].get(uid, 0)) for state in (before, after))
                lines.append(f"{name} of {uid} was {was} and is {is_}{how_long}")
            continue
        was, is_ = (shown(field, state.get(field)) for state in (before, after))
        lines.append(f"{name} was {was} and is {is_}{how_long}")
    return lines


def shown(field: str, value: Any) -> str:
    """Return a value of an option as a user would write it."""
    flag = flags().get(field)
    if field == "download_limit":
        return _rate(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and flag is not None:
        if flag.metavar == "TIME":
            return format_duration(value)
        if flag.metavar == "SIZE":
            return format_bytes(int(value))
    return str(value)


def _rate(bytes_per_s: int) -> str:
    return f"{format_bytes(bytes_per_s)}/s" if bytes_per_s else "unlimited"
