"""`cachefs reload` applies the present content of a mount's configuration file."""

import json
import os
from pathlib import Path
from typing import Any

import click

from cachefs.cli.mounting.start import mount_config
from cachefs.cli.mounts.one_mount import the_mount
from cachefs.cli.output.text import say
from cachefs.cli.set import change, shown
from cachefs.config import LIVE, MountConfig, flags, to_json
from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import MountError
from cachefs.mounts import find_entry, socket_path

_TIMEOUT_S = 10.0


@click.command("reload")
@click.argument("mountpoint", required=False)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def command(mountpoint: str | None, debug: bool) -> None:
    """Read the configuration file again that MOUNTPOINT (default: the only one) was mounted with.

    The command changes each option that can change while mounted, even if cachefs set has changed
    it since. For the other options it prints that a new mount is needed. Options on the command
    line of the mount still win over the file.
    """
    place = the_mount(mountpoint)
    entry = find_entry(place)
    given = {} if entry is None else dict(entry.given)
    if not given.get("file"):
        raise MountError(
            f"{place} was mounted without a configuration file; cachefs set changes its options"
        )
    os.chdir(given["directory"] if Path(given["directory"]).is_dir() else "/")
    config = mount_config(given["source"], str(place), given["fields"], given["file"])
    wanted = _wanted(config, ask(socket_path(place), api.SETTINGS, timeout_s=_TIMEOUT_S))
    if wanted:
        change(place, wanted, "")
    fixed = _fixed(given["config"], json.loads(to_json(config)))
    for line in fixed:
        say(line)
    if not wanted and not fixed:
        say(f"{place}: nothing has changed in {given['file']}")


def _wanted(config: MountConfig, now: dict[str, Any]) -> dict[str, Any]:
    """Return the options that must change while mounted."""
    wanted: dict[str, Any] = {}
    for name in LIVE:
        value = getattr(config, name)
        if name == "limit_uid":
            old = {int(uid): rate for uid, rate in now.get(name, {}).items()}
            value = {uid: value.get(uid, 0) for uid in {**old, **value}}
            value = {uid: rate for uid, rate in value.items() if rate != old.get(uid, 0)}
            if value:
                wanted[name] = value
        elif name in now and value != _number(now[name]):
            wanted[name] = value
    return wanted


def _number(value: Any) -> Any:
    return float("inf") if value == "indefinite" else value


def _fixed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each option that differs but can't change while mounted."""
    lines = []
    for name in sorted({*before, *after} - set(LIVE)):
        if before.get(name) != after.get(name):
            flag = flags().get(name)
            key = "tier" if name == "tier_tables" else name if flag is None else flag.key
            hint = "; cachefs tier changes tiers while mounted" if key == "tier" else ""
            was, is_ = (_text(name, state) for state in (before, after))
            lines.append(f"{key} needs a new mount: it is {was}, the file says {is_}{hint}")
    return lines


def _text(name: str, values: dict[str, Any]) -> str:
    return shown(name, values[name]) if name in values else "the default"
