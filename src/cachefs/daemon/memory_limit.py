"""Bounds the daemon's buffers by the memory limit of its control group, if there is one."""

import logging
from pathlib import Path

from cachefs.units import format_bytes

log = logging.getLogger(__name__)

_PROC = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_NAMES = ("memory.max", "memory.limit_in_bytes")
"""File names of the limit in control groups of version 2 and of version 1."""

_BUFFER_SHARE = 4
"""The buffer may take a quarter of the limit: the daemon itself needs about 80 MB, and arriving
data is in memory twice for a moment."""
_LEAST_BYTES = 8 << 20


def bounded_buffer(wanted_bytes: int) -> int:
    """Return the buffer size in bytes: `wanted_bytes` (`--buffer-size`), but at most a quarter of
    the control group's limit. The bound itself is at least 8 MiB."""
    limit_bytes = memory_limit()
    if limit_bytes is None or wanted_bytes <= limit_bytes // _BUFFER_SHARE:
        return wanted_bytes
    bounded_bytes = max(_LEAST_BYTES, limit_bytes // _BUFFER_SHARE)
    if wanted_bytes <= bounded_bytes:
        return wanted_bytes
    log.info(
        "at most %s of memory for data on its way, not %s: the control group is limited to %s",
        *(format_bytes(number) for number in (bounded_bytes, wanted_bytes, limit_bytes)),
    )
    return bounded_bytes


def memory_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the smallest memory limit, in bytes, of this process's control group and its parents.

    Returns None if there is no limit, or if it can't be read.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = cgroups / "memory" if controllers else cgroups
        group = top / path.lstrip("/")
        limits += [_limit(place) for place in (group, *group.parents) if place.is_relative_to(top)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> int | None:
    for name in _NAMES:
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):  # there is no such file, or it contains "max"
            continue
    return None
