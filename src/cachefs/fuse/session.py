"""The kernel side of a mount: mounting, tuning, telling the kernel what changed."""

import logging
import os
from pathlib import Path
from urllib.parse import quote

import pyfuse3

from cachefs.errors import MountError
from cachefs.fuse.operations import Operations

log = logging.getLogger(__name__)

FSTYPE = "fuse.cachefs"

_IDLE_TASKS = 16
_MAX_TASKS = 1_000
"""Requests handled at once. A reader that waits for the origin occupies one, so there must be more
than readers times their read-ahead; an unused one costs nothing."""
_READ_AHEAD_KB = 1024
_MAX_BACKGROUND = 256
"""Kernel defaults are 128 KiB of read-ahead and 12 background requests: too few to keep an origin
busy. 1 MiB doubled sequential throughput; more than a block gains nothing."""


def mount(operations: Operations, mountpoint: str, source: str, allow_other: bool) -> None:
    """Mount read-only. The kernel enforces permissions, and refuses writes with EROFS.

    Raises `MountError` when the kernel or fusermount3 refuses.
    """
    name = quote(source, safe="/:@?&=+~!$'()*;%#")  # no comma: it separates mount options
    options = {f"fsname={name}", "subtype=cachefs", "ro", "default_permissions"}
    if allow_other:
        options.add("allow_other")
    try:
        pyfuse3.init(operations, mountpoint, options)
    except RuntimeError as error:
        raise MountError(
            f"can't mount on {mountpoint}: {error}; is /dev/fuse there and fuse3 installed?"
            + _allow_other_hint(allow_other)
        ) from error


def _allow_other_hint(allow_other: bool) -> str:
    if allow_other and os.geteuid() != 0:
        return " (allow_other needs user_allow_other in /etc/fuse.conf)"
    return ""


async def serve() -> None:
    """Answer requests until the mount ends."""
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


def tune(mountpoint: str) -> None:
    """Raise the kernel's read-ahead and request limits for this mount; root only, best effort.

    Blocks for a stat of the mount: never call it on the loop that serves it.
    """
    device = os.stat(mountpoint).st_dev  # noqa: PTH116 - a Path adds nothing here
    bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    connection = Path(f"/sys/fs/fuse/connections/{os.minor(device)}")
    for file, value in (
        (bdi, _READ_AHEAD_KB),
        (connection / "max_background", _MAX_BACKGROUND),
        (connection / "congestion_threshold", _MAX_BACKGROUND * 3 // 4),
    ):
        try:
            file.write_text(str(value))
        except OSError as error:
            log.debug("can't tune %s: %s", file, error)
