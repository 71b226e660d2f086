"""Wall-clock time and ages.

Ages are kept over restarts, so they are wall-clock; a time stamp from the future (the clock was
set back) counts as expired long ago, never as fresh for longer than a TTL.
"""

import math
import time
from collections.abc import Callable


class Clock:
    """`now` returns wall-clock nanoseconds; tests give their own."""

    __slots__ = ("now_ns",)

    def __init__(self, now: Callable[[], int] = time.time_ns) -> None:
        self.now_ns = now

    def remaining_ns(self, since_ns: int, ttl_ns: float) -> float:
        """How much of the TTL is left for something known since then; <= 0 when expired, by how
        much; `-inf` if nobody can tell."""
        age_ns = self.now_ns() - since_ns
        return ttl_ns - age_ns if age_ns >= 0 else -math.inf
