"""Wall-clock time and ages.

Ages must survive restarts, so they use the wall clock. A time stamp from the future means that the
clock was set back: it counts as expired long ago, so that nothing is fresh for longer than a TTL.
"""

import math
import time
from collections.abc import Callable

GRAIN_NS = 10_000_000
"""What the times of directories are multiples of. Other file systems have such a grain, too: their
times are those of the kernel's last tick."""


def coarse_ns(time_ns: int) -> int:
    """Return the last multiple of `GRAIN_NS`. The rest of the mtime of a directory is no time, see
    `directories/directory_validators.py`."""
    return time_ns - time_ns % GRAIN_NS


class Clock:
    """The clock of a mount. `now` returns wall-clock nanoseconds; tests pass their own."""

    __slots__ = ("now_ns",)

    def __init__(self, now: Callable[[], int] = time.time_ns) -> None:
        self.now_ns = now

    def remaining_ns(self, since_ns: int, ttl_ns: float) -> float:
        """Return the nanoseconds until information from `since_ns` expires.

        The result is <= 0 if it has expired (negative: that long ago), and `-inf` if `since_ns`
        is in the future.
        """
        age_ns = self.now_ns() - since_ns
        return ttl_ns - age_ns if age_ns >= 0 else -math.inf
