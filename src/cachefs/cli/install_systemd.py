"""`cachefs install-systemd` writes the systemd units with this installation's command in them."""

import os
import shutil
import sys
from importlib import resources
from pathlib import Path

import click

from cachefs.cli import debug_option
from cachefs.cli.output.text import say
from cachefs.errors import CachefsError

MOUNT_HELPER = "mount.cachefs"
_SBIN = Path("/sbin")
_COMMAND_IN_UNITS = "/usr/bin/cachefs"
_SYSTEM_UNITS = Path("/etc/systemd/system")
_SYSTEM_INSTANCES = Path("/etc/cachefs")


@click.command("install-systemd")
@click.option(
    "--user", is_flag=True, help="Install the units for your own service manager, without root."
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write the units into this directory, and change nothing else. "
    "[/etc/systemd/system; with --user ~/.config/systemd/user]",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only print what would be done.")
@debug_option
def command(user: bool, directory: Path | None, dry_run: bool) -> None:
    """Install cachefs@.service, cachefs-load@.service, cachefs-load@.timer and, as root,
    cachefs-keeper.service.

    The file /etc/cachefs/NAME.toml (with --user: ~/.config/cachefs/NAME.toml) defines the instance
    NAME: the options of `cachefs mount`, a source and a mountpoint.

    Without --user and --dir, the command also links mount.cachefs into /sbin, for
    `mount -t cachefs` and /etc/fstab.
    """
    program = _program("cachefs")
    try:
        for name, text in units(user, program).items():
            _write((directory or _unit_dir(user)) / name, text, dry_run)
        if directory is None:
            _make_private(_instance_dir(user), dry_run)
        if directory is None and not user:
            link_helper(_SBIN / MOUNT_HELPER, _program(MOUNT_HELPER), dry_run)
    except OSError as error:
        fix = "" if user or directory else "; run it as root, or with --user"
        raise CachefsError(f"can't write {error.filename}: {error.strerror}{fix}") from error
    click.echo(_what_next(user))


def units(user: bool, program: Path) -> dict[str, str]:
    """Return the text of each unit by its file name; the units start `program`."""
    home = resources.files("cachefs") / "systemd"
    files = (home / "user" if user else home).iterdir()
    return {
        file.name: file.read_text("utf-8").replace(_COMMAND_IN_UNITS, _quoted(program))
        for file in sorted(files, key=lambda file: file.name)
        if file.is_file()
    }


def _quoted(program: Path) -> str:
    """Quote `program` as the first word of an Exec line (systemd.service(5))."""
    text = str(program).replace("%", "%%").replace("$", "$$")
    if not any(sign in text for sign in " \t\"'\\;"):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _program(name: str) -> Path:
    """Return the console script `name` of the running installation. Raises `CachefsError`."""
    running = Path(sys.argv[0])
    for directory in (
        *([running.absolute().parent] if running.name == "cachefs" else []),
        Path(sys.executable).parent,
    ):
        if os.access(directory / name, os.X_OK):
            return directory / name
    found = shutil.which(name)
    if found is None:
        raise CachefsError(f"there is no command {name} beside {sys.executable}; install cachefs")
    return Path(found).absolute()


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()


def _unit_dir(user: bool) -> Path:
    return _config_home() / "systemd/user" if user else _SYSTEM_UNITS


def _instance_dir(user: bool) -> Path:
    return Path("~/.config/cachefs").expanduser() if user else _SYSTEM_INSTANCES


def _write(file: Path, text: str, dry_run: bool) -> None:
    if file.is_file() and file.read_text("utf-8") == text:
        say(f"{file} is up to date")
        return
    if dry_run:
        say(f"would write {file}")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    say(f"wrote {file}")


def _make_private(directory: Path, dry_run: bool) -> None:
    """Create `directory` with mode 700, because it may contain credentials."""
    if directory.is_dir():
        return
    if dry_run:
        say(f"would create {directory}")
        return
    directory.mkdir(parents=True, mode=0o700)
    say(f"created {directory}")


def link_helper(link: Path, target: Path, dry_run: bool) -> None:
    """Make `link` a symlink to `target`, unless another file or working link exists there."""
    if os.path.lexists(link) and (not link.is_symlink() or link.exists()):
        theirs = link.resolve() != target.resolve()
        say(f"left {link} as it is" if theirs else f"{link} is up to date")
        return
    if dry_run:
        say(f"would link {link} to {target}")
        return
    link.unlink(missing_ok=True)  # a dangling link
    link.symlink_to(target)
    say(f"linked {link} to {target}")


def _what_next(user: bool) -> str:
    systemctl = "systemctl --user" if user else "systemctl"
    instances = "~/.config/cachefs" if user else "/etc/cachefs"
    return f"""
Next, for an instance NAME:
  1. {instances}/NAME.toml, with at least
         source = "s3://bucket/prefix"
         mountpoint = "/mnt/data"
     and credentials, if it needs any, in {instances}/NAME.env (mode 600)
  2. {systemctl} daemon-reload
  3. {systemctl} enable --now cachefs@NAME.service
  4. for nightly loads, [load] in the same file, and
     {systemctl} enable --now cachefs-load@NAME.timer"""
