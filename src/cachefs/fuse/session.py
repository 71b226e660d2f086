"""The kernel side of a mount: mounting, tuning, telling the kernel what changed."""

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3

from cachefs.errors import MountError
from cachefs.fuse import loop
from cachefs.fuse.kernel_mount import refuse_early, shown_source
from cachefs.fuse.operations import Operations

log = logging.getLogger(__name__)

_OPTIONS = ("subtype=cachefs", "ro", "default_permissions")
_IDLE_TASKS = 16
_MAX_TASKS = 1_000
"""Requests handled at once. A reader that waits for the origin occupies one, so there must be more
than readers times their read-ahead; an unused one costs nothing."""
_READ_AHEAD_KB = 1024
"""Eight times the kernel's default; doubled sequential throughput. More than a block gains
nothing."""
_MAX_BACKGROUND = 256
"""The kernel's default is 12. With 9 read-aheads in flight it counts the mount as congested, gives
up reading ahead and asks for single pages: 16 readers of small files sent 2.4 READs a file."""


def mount(operations: Operations, mountpoint: str, source: str, allow_other: bool) -> None:
    """Mount read-only. The kernel enforces permissions, and refuses writes with EROFS.

    Raises `MountError` when the kernel or fusermount3 refuses.
    """
    refuse_early(allow_other)
    options = {*_OPTIONS, f"fsname={shown_source(source)}"}
    if allow_other:
        options.add("allow_other")
    try:
        pyfuse3.init(operations, mountpoint, options)
    except RuntimeError as error:
        raise MountError(
            f"can't mount on {mountpoint}: {error}; is fuse3 installed, and may this user mount?"
        ) from error


async def serve() -> None:
    """Answer requests until the mount ends."""
    loop.install()
    await pyfuse3.main(min_tasks=_IDLE_TASKS, max_tasks=_MAX_TASKS)


def stop() -> None:
    """Make `serve` return."""
    pyfuse3.terminate()


def unmount() -> None:
    """Unmount, lazily if it is in use, and free the session."""
    pyfuse3.close(unmount=True)


def forget_entry(parent: int, name: bytes) -> None:
    """Make the kernel ask again for a name. Returns at once; names it doesn't know are fine."""
    pyfuse3.invalidate_entry_async(parent, name, ignore_enoent=True)


def forget_attributes(ino: int) -> None:
    """Make the kernel ask again for owner, group and mode; an inode it doesn't know is fine."""
    with suppress(OSError):
        pyfuse3.invalidate_inode(ino, attr_only=True)


def tune(mountpoint: str) -> None:
    """Raise the kernel's read-ahead and request limits for this mount; root only, best effort.

    Blocks for a stat of the mount: never call it on the loop that serves it.
    """
    device = os.stat(mountpoint).st_dev  # noqa: PTH116 - a Path adds nothing here
    bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")
    _write_setting(bdi / "read_ahead_kb", _READ_AHEAD_KB)
    with _fusectl() as connections:
        connection = connections / str(os.minor(device))
        _write_setting(connection / "max_background", _MAX_BACKGROUND)
        _write_setting(connection / "congestion_threshold", _MAX_BACKGROUND * 3 // 4)


@contextmanager
def _fusectl() -> Iterator[Path]:
    """The directory of FUSE connections. systemd mounts it; where nobody has, it is mounted for
    the moment in a private place, so that nothing is left behind."""
    usual = Path("/sys/fs/fuse/connections")
    if os.geteuid() != 0 or os.path.ismount(usual):
        yield usual
        return
    with tempfile.TemporaryDirectory(prefix="cachefs-") as private:
        command = ["mount", "-t", "fusectl", "fusectl", private]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            yield usual
            return
        try:
            yield Path(private)
        finally:
            subprocess.run(["umount", private], capture_output=True, check=False)


def _write_setting(file: Path, value: int) -> None:
    try:
        file.write_text(str(value))
    except OSError as error:
        log.debug("can't tune %s: %s", file, error)
