"""`mount.cachefs`, which mount(8) runs for `mount -t cachefs SOURCE DIR -o ...` and for fstab."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cachefs import __version__
from cachefs.cli import explain
from cachefs.cli.mounting.environment_file import read_variables
from cachefs.cli.mounting.mount_words import FSTAB, IGNORED, parse_mount_words
from cachefs.cli.mounting.start import given, mount_config, start
from cachefs.cli.output.standard_files import prepare_standard_files
from cachefs.cli.output.text import say
from cachefs.errors import UsageError

_PROGRAM = "mount.cachefs"
_USAGE = 1
_MOUNT_FAILURE = 32
"""Exit codes of mount(8)."""


@click.command(_PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@click.argument("source")
@click.argument("mountpoint")
@click.option("-f", "fake", is_flag=True, help="Check everything, but do not mount.")
@click.option(
    "-n",
    "no_mtab",
    is_flag=True,
    help="Do nothing. The option is accepted because mount(8) passes it.",
)
@click.option("-s", "sloppy", is_flag=True, help="Ignore unknown options.")
@click.option("-v", "verbose", is_flag=True, help="Print what is mounted.")
@click.option("-N", "namespace", hidden=True)
@click.option("-t", "fstype", hidden=True, help="The type of the file system, which is cachefs.")
@click.option(
    "-o",
    "words",
    metavar="WORD[,WORD...]",
    multiple=True,
    help="Options of `cachefs mount` as words: cache_dir=/ssd,cache_size=1TiB,allow_other. The "
    "word writable means --rw. config=NAME.toml reads the options in that file, and the "
    "credentials in NAME.env beside it.",
)
def command(
    source: str,
    mountpoint: str,
    fake: bool,
    no_mtab: bool,
    sloppy: bool,
    verbose: bool,
    namespace: str | None,
    fstype: str | None,
    words: tuple[str, ...],
) -> None:
    """Mount SOURCE on MOUNTPOINT, for mount(8). See `cachefs mount --help` for the options."""
    if namespace is not None:
        raise UsageError("-N is not possible; run mount inside that namespace: nsenter")
    config_file, others = _config_file(",".join(words))
    fields = parse_mount_words(others, IGNORED | FSTAB, sloppy=sloppy)
    if config_file is not None:
        os.environ.update(read_variables(Path(config_file)))
    config = mount_config(source, mountpoint, fields, config_file)
    if not fake:
        start(config, given(source, fields, config_file))
    if verbose:
        verb = "would be mounted" if fake else "mounted"
        say(f"{_PROGRAM}: {config.source} {verb} on {config.mountpoint}")


def _config_file(words: str) -> tuple[str | None, str]:
    """Return the file of `config=FILE`, if any, and the other words. Raises `UsageError`."""
    parts = words.split(",")
    files = [part.removeprefix("config=") for part in parts if part.startswith("config=")]
    if len(files) > 1:
        raise UsageError("-o config is given twice")
    others = ",".join(part for part in parts if not part.startswith("config="))
    return (files[0] if files else None), others


def main(args: Sequence[str] | None = None) -> None:
    """Run the console script and exit with 0, 1 for wrong usage, or 32 for a failure."""
    argv = sys.argv[1:] if args is None else list(args)
    prepare_standard_files()
    try:
        code = command.main(argv, _PROGRAM, standalone_mode=False) or 0
        sys.stdout.flush()
    except BaseException as error:
        code = _USAGE if explain(error, _PROGRAM) == 2 else _MOUNT_FAILURE
    sys.exit(code)
