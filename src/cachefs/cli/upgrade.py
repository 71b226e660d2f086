"""`cachefs upgrade` replaces the daemon of a mount; the mount stays."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.all_mounts import FOREIGN, STALE, UNKNOWN, collect
from cachefs.cli.mounts.one_mount import mountpoint_or_configured, the_mount
from cachefs.cli.output.text import say
from cachefs.cli.views.progress import waiting
from cachefs.control.client import ask
from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.mounts import find_entry, open_owner, socket_path

_TIMEOUT_S = 120.0
_LOOK_S = 0.1
_BETWEEN_TWO_S = 15.0
"""The limit for the start of the next daemon after one has just died."""


@click.command("upgrade")
@click.argument("mountpoint", required=False)
@click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    help="Upgrade the mountpoint that this TOML file names.",
)
@click.option("-a", "--all", "upgrade_all", is_flag=True, help="Upgrade all your mounts.")
@debug_option
def command(mountpoint: str | None, config_file: str | None, upgrade_all: bool) -> int:
    """Let the installed version of cachefs serve MOUNTPOINT (default: the only one).

    The mount stays: files stay open, reads of cached data continue, and other reads wait for some
    tenths of a second. The supervisor starts a new daemon with the options of the old one. The new
    daemon takes over once its code is loaded; if it can't, the old one continues. The new daemon
    starts load jobs again from their beginning, but fetches nothing twice.

    With --all, a mount that can't be upgraded does not keep the others from it; the exit code is
    then 1. Mounts of other users are only named: only their users can upgrade them.

    This works only for mounts on the relay's data path (see cachefs status MOUNTPOINT).
    """
    if upgrade_all:
        if mountpoint is not None or config_file is not None:
            raise UsageError("--all upgrades all mounts; name none, and leave -c out")
        return _upgrade_all()
    _upgrade(the_mount(mountpoint_or_configured(mountpoint, config_file)))
    return 0


def _upgrade_all() -> int:
    """Upgrade one mount after the other, and return the exit code."""
    code = 0
    rows = collect()
    for row in rows:
        place, state = Path(row["mountpoint"]), row["state"]
        if state in {FOREIGN, UNKNOWN}:
            say(f"{place}: {row['problem']}")
        elif state == STALE:
            say(f"{place}: {row['problem']}", err=True)
        else:
            try:
                _upgrade(place)
            except CachefsError as error:
                say(f"cachefs: error: {error}", err=True)
                code = 1
    if not rows:
        say("nothing is mounted")
    return code


def _upgrade(place: Path) -> None:
    """Replace the daemon of one mount. Raises `CachefsError`."""
    before = _ask_to_be_replaced(place)
    with waiting(f"waiting for another daemon on {place}"):
        after = _await_another(place, before)
    was, is_ = before["version"], after["version"]
    change = f"cachefs {is_}" if was == is_ else f"cachefs {was} -> {is_}"
    say(f"{place}: process {after['pid']} serves instead of {before['pid']}; {change}")


def _ask_to_be_replaced(place: Path) -> dict[str, Any]:
    """Send the supervisor SIGHUP and return the status of the daemon that it will replace.

    Raises `MountError`.
    """
    status = ask(socket_path(place), timeout_s=_BETWEEN_TWO_S)
    supervisor_pid = status.get("supervisor_pid")
    if supervisor_pid is None:
        reason = (status.get("data_path") or {}).get("reason") or "of an earlier version"
        raise MountError(
            f"{place} has no supervisor that could replace its daemon ({reason}); unmount it and "
            f"mount it again: cachefs umount {place}"
        )
    entry = find_entry(place)
    if entry is not None and entry.is_elsewhere:
        raise MountError(f"{place} is served by {entry.who}; upgrade it there")
    is_it = entry is not None and entry.pid == supervisor_pid
    pidfd = open_owner(entry) if is_it else None
    if entry is None or pidfd is None:
        raise MountError(f"{place}: the mount has ended")
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGHUP)
    finally:
        os.close(pidfd)
    return {**status, "failed_at": entry.upgrade_failed_at}


def _await_another(place: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Wait for the next daemon and return its status. Raises `MountError`."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        entry = find_entry(place)
        if entry is None or not entry.alive:
            raise MountError(f"{place}: the mount has ended")
        if entry.upgrade_failed_at > before["failed_at"]:
            raise MountError(
                f"{place}: the new daemon can't take over, process {before['pid']} serves on: "
                f"{entry.upgrade_failure}"
            )
        try:
            status = ask(socket_path(place))
        except CachefsError:
            continue
        if status["pid"] != before["pid"] and status["mounted"]:
            return status
    raise MountError(
        f"{place}: no other daemon answered within {_TIMEOUT_S:.0f} s; its log shows why"
    )
