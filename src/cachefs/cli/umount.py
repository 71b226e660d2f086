"""`cachefs umount` removes a mount and waits for the end of its daemon."""

import contextlib
import errno
import os
import select
import signal
import time
from pathlib import Path

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.one_mount import mountpoint_or_configured
from cachefs.cli.output.text import say
from cachefs.cli.views.last_sends import LastSends
from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.mounts import (
    FSTYPE,
    MountEntry,
    MountHealth,
    RuntimeEntry,
    canonical,
    check_answers,
    checked_mountpoint,
    find_entry,
    find_mount,
    holders,
    open_owner,
    remove_leftovers,
    unmount,
)

EXIT_TIMEOUT_S = 30.0
LAZY_TIMEOUT_S = 1.0
KILL_AFTER_S = 2.5
BUSY_RETRY_S = 1.0
"""How long to retry a busy mount, which a process such as an indexer may use for a moment."""
DEAD_S = 0.5
"""How long a dead mount may take to fail a request."""


@click.command("umount")
@click.argument("mountpoint", required=False)
@click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    help="Unmount the mountpoint that this TOML file names.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="Only remove what a dead daemon has left. If there is nothing, this is no error.",
)
@click.option(
    "-l",
    "--lazy",
    is_flag=True,
    help="Hide the mount now, and end it when nobody uses it any more.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Unmount also if the mount is in use or hangs, and kill the daemon.",
)
@debug_option
def command(
    mountpoint: str | None,
    config_file: str | None,
    stale: bool,
    lazy: bool,
    force: bool,
) -> int:
    """Unmount MOUNTPOINT and wait until its daemon has ended.

    Before, what is unsent in a writable mount is sent to the source. Ctrl-C ends only this wait:
    what is unsent stays in the spool. With --lazy and --force there is no such wait.
    """
    place = _place(mountpoint, config_file)
    if stale:
        _remove_stale(place)
        return 0
    _leave(place)
    entry = find_entry(place)
    daemon = open_owner(entry)
    is_served = entry is not None and entry.alive
    sends = LastSends(place)
    is_done = False
    try:
        mount = find_mount(place)
        if mount is not None:
            is_ending = is_served and not (lazy or force) and mount.fstype == FSTYPE
            if is_ending and _is_writable(entry):
                sends.wait()
            try:
                _remove(mount, lazy=lazy, force=force)
            except CachefsError:
                sends.note_still_mounted()
                raise
            if sends.is_interrupted and daemon is not None and entry and not entry.supervised:
                _signal(daemon, signal.SIGTERM)  # it may wait for a close of a killed process
        elif daemon is None:
            remove_leftovers(place)
            raise _not_mounted(place, entry)
        elif entry is not None and entry.device and not force:
            _await_users(daemon, entry, lazy=lazy)
            is_done = True
        else:
            _signal(daemon, signal.SIGTERM)
        if daemon is not None and entry is not None and not is_done:
            _await_exit(daemon, entry, lazy=lazy, force=force)
        elif entry is not None and entry.is_elsewhere:
            _await_end_elsewhere(entry)
    finally:
        if daemon is not None:
            os.close(daemon)
    remove_leftovers(place)
    sends.tell_rest()
    return 130 if sends.is_interrupted else 0


def _place(mountpoint: str | None, config_file: str | None) -> Path:
    mountpoint = mountpoint_or_configured(mountpoint, config_file)
    if mountpoint is None:
        raise UsageError("there is no mountpoint; name one, or a file with --config")
    return canonical(checked_mountpoint(mountpoint))


def _leave(place: Path) -> None:
    """Leave the mount, so that this process itself doesn't make it busy: a user may unmount `.`."""
    with contextlib.suppress(OSError):
        if Path.cwd().is_relative_to(place):
            os.chdir("/")


def _remove_stale(place: Path) -> None:
    """Remove a dead mount. It fails each request at once, so a mount that a keeper holds, and that
    does not answer, need not be waited for."""
    mount = find_mount(place)
    is_ours = mount is not None and mount.fstype == FSTYPE
    if mount is not None and is_ours and check_answers(place, DEAD_S) is MountHealth.DEAD:
        _remove(mount, lazy=True, force=False)
    remove_leftovers(place)


def _is_writable(entry: RuntimeEntry | None) -> bool:
    """Return whether the mount can have unsent files. Earlier versions did not note its options."""
    options = (entry.given or {}).get("config") if entry is not None else None
    return options is None or not options.get("read_only", True)


def _remove(mount: MountEntry, *, lazy: bool, force: bool) -> None:
    place = mount.mountpoint
    if mount.fstype != FSTYPE:
        raise MountError(
            f"{place} is a mount of {mount.source} ({mount.fstype}), not of cachefs; use umount"
        )
    health = None if lazy or force else check_answers(place)
    lazy = lazy or health is MountHealth.DEAD
    deadline = time.monotonic() + BUSY_RETRY_S
    while True:
        try:
            unmount(place, lazy=lazy, force=force)
            return
        except OSError as error:
            if error.errno == errno.EINVAL and find_mount(place) is None:
                return  # its daemon, which ended at this moment, has unmounted it
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise _explained(error, mount, health) from error
        time.sleep(0.1)


def _explained(error: OSError, mount: MountEntry, health: MountHealth | None) -> CachefsError:
    place = mount.mountpoint
    if error.errno == errno.EBUSY and health is MountHealth.HANGING:  # the check itself uses it
        return MountError(
            f"{place} does not answer, so who uses it can't be known; use --lazy, or --force, "
            "which lets the requests fail that wait"
        )
    if error.errno == errno.EBUSY:
        found = [
            f"this command itself ({h.what})"
            if h.pid == os.getpid()
            else f"{h.name} (process {h.pid}: {h.what})"
            for h in holders(place)
        ]
        who = "; ".join(found) or "a process that can't be seen here"
        return MountError(f"{place} is in use by {who}; end that, or use --lazy")
    if error.errno == errno.EPERM and mount.other_user is not None:
        user = f"user (uid {mount.other_user})"
        return MountError(
            f"{place} is a mount of another {user}; unmount it as that user or as root"
        )
    if error.errno in {errno.EPERM, errno.EINVAL} and os.geteuid() == 0:
        return MountError(
            f"can't unmount {place}: {error.strerror}; the root of this container has no right to: "
            "unmount it in the container that mounted it, or on the host"
        )
    return MountError(f"can't unmount {place}: {error.strerror}")


def _not_mounted(place: Path, entry: RuntimeEntry | None) -> MountError:
    if entry is not None and entry.alive and entry.is_elsewhere:
        return MountError(
            f"{place} is not mounted here, and is served by {entry.who}; unmount it there"
        )
    return MountError(f"{place} is not mounted; cachefs status shows what is")


def _await_end_elsewhere(entry: RuntimeEntry) -> None:
    """Wait for a daemon that this process can't see, and that goes on if its mount is visible
    elsewhere."""
    deadline = time.monotonic() + KILL_AFTER_S
    while (now := find_entry(Path(entry.mountpoint))) is not None and now.alive:
        if time.monotonic() >= deadline:
            say(
                f"{entry.mountpoint} is unmounted here; {entry.who} serves those who still use it "
                "until they are done, and all of them until it is unmounted there, too"
            )
            return
        time.sleep(0.02)


def _await_users(daemon: int, entry: RuntimeEntry, *, lazy: bool) -> None:
    """Wait for the daemon of a place that is already unmounted. It ends by itself after its last
    user. Raises `MountError`."""
    if _exits_within(daemon, LAZY_TIMEOUT_S if lazy else KILL_AFTER_S):
        return
    said = (
        f"{entry.mountpoint} is unmounted already, and process {entry.pid} serves those who still "
        "use it"
    )
    if lazy:
        say(said)
        return
    raise MountError(
        f"{said}; wait until they are done, or end it: cachefs umount --force {entry.mountpoint}"
    )


def _await_exit(daemon: int, entry: RuntimeEntry, *, lazy: bool, force: bool) -> None:
    timeout_s = KILL_AFTER_S if force else LAZY_TIMEOUT_S if lazy else EXIT_TIMEOUT_S
    if _exits_within(daemon, timeout_s):
        return
    if force:
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(daemon, number)
            if _exits_within(daemon, KILL_AFTER_S):
                return
    if lazy:
        say(
            f"{entry.mountpoint} is unmounted for new users; process {entry.pid} serves the "
            "present ones until they are done"
        )
        return
    where = f"; see {entry.log_file}" if entry.log_file else ""
    raise MountError(
        f"{entry.mountpoint} is unmounted, but its daemon (process {entry.pid}) has not ended "
        f"within {timeout_s:.0f} s{where}"
    )


def _exits_within(daemon: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _signal(daemon: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(daemon, number)
