"""`cachefs fluid` is the entry point of the FUSE container of a ThinRuntime of Fluid."""

import os
import tempfile
from pathlib import Path

import click

from cachefs import log
from cachefs.cli import debug_option


@click.command("fluid")
@click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("/etc/fluid/config/config.json"),
    show_default=True,
    help="The file in which Fluid describes the mounts.",
)
@click.option(
    "--secrets",
    "secrets_dir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("/etc/fluid/secrets"),
    show_default=True,
    help="The directory in which Fluid mounts Secrets.",
)
@debug_option
def command(config_file: Path, secrets_dir: Path) -> None:
    """Mount what Fluid's config.json describes, and follow its changes until SIGTERM.

    This is the command of the FUSE container of a ThinRuntime (docs/FLUID.md). It reads the
    variables MOUNT_OPTIONS, which Fluid sets, and CACHEFS_CACHE_DIR.
    """
    from cachefs.cli.thin_runtime.reconcile import Reconciler
    from cachefs.cli.thin_runtime.wanted import Wanted, wanted_mounts

    log.setup(tracebacks=False)
    with tempfile.TemporaryDirectory(prefix="cachefs-fluid-", dir=_memory_dir()) as private:

        def describe(content: bytes) -> Wanted:
            return wanted_mounts(content, os.environ, secrets_dir, Path(private))

        Reconciler(config_file, describe).run()


def _memory_dir() -> str | None:
    """Return a directory in memory for credentials; None for the usual one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
