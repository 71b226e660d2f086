"""`cachefs keeper` keeps mounts while nobody serves them."""

from pathlib import Path

import click

from cachefs import log, systemd_notify
from cachefs.cli import debug_option
from cachefs.errors import UsageError
from cachefs.mounts import keeper_path
from cachefs.supervisor.keeper import Keeper
from cachefs.units import parse_duration


@click.command("keeper")
@click.option(
    "--socket",
    "path",
    metavar="FILE",
    help="The socket on which mounts reach the keeper (cachefs mount --keeper "
    "SOCKET). [default: keeper.sock in /run/cachefs, or in the user's runtime "
    "directory]",
)
@click.option(
    "--wait",
    metavar="TIME",
    default="5m",
    show_default=True,
    help="Unmount a mount after nobody has served it for this time.",
)
@debug_option
def command(path: str | None, wait: str) -> None:
    """Keep mounts while their container or service is replaced. Runs in the foreground.

    A mount with --keeper is not unmounted when its processes end: the keeper holds it, and its
    readers wait until the next cachefs mount with the same mountpoint and source continues it.
    Open files stay open. cachefs umount and Ctrl-C unmount as always.

    Run one keeper on each node, outside of the container of the mounts: as a container of its own
    (docs/KUBERNETES.md), or as the unit cachefs-keeper.service.
    """
    try:
        wait_s = parse_duration(wait)
    except UsageError as error:
        raise UsageError(f"--wait: {error}") from error
    manager = systemd_notify.take_over()
    log.setup(tracebacks=False)
    keeper = Keeper(Path(path) if path else keeper_path(), wait_s)
    keeper.run(lambda: manager.ready("keeping mounts"))
    manager.stopping()
