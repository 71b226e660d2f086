"""`LoopClock`: trio's clock without the time in which this process did not run.

A paused container, a moved virtual machine, a laptop's lid, or a machine with too few processors
can keep a process from running for seconds. When it goes on, all deadlines have passed, although
nobody had the chance to answer, or the answers wait in the sockets. So the time of such a *gap*
counts for no deadline of the event loop.

The loop says how long it sleeps at most. If it wakes later than that, it did not run meanwhile. A
gap within a longer sleep isn't noticed, but no deadline passes in it. Time always goes on: after a
short delay only the end of a sleep is repeated, and gaps in close succession count.
"""

import random
from collections.abc import Callable
from time import perf_counter

import trio
from trio.abc import Clock

GAP_S = 0.25
"""A longer delay is a gap: nothing of the time since the loop ran last counts."""
LATE_S = 0.005
"""After a longer delay, the loop first looks for answers that have come meanwhile."""
_REST_S = 0.002
"""What is repeated of a sleep that ended too late."""
_LEAST_REPEATED_S = 0.001
_COUNTED_S = 0.001
"""What counts of a gap, so that its end is later than its beginning."""
_RUNS_S = 1.0
"""The least time between two gaps."""


class LoopClock(Clock):
    """For `trio.run`. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.gap_at = float("-inf")
        """When the last gap ended, on this clock."""
        self._now = now
        self._offset = random.uniform(10_000, 200_000)  # as trio's own clock
        self._seen_at = now()
        self._slept_s = 0.0
        self._on_time_until = self._seen_at + GAP_S
        self._gap_ended_at = float("-inf")

    def start_clock(self) -> None:
        """See trio."""
        self._seen_at = self._now()
        self._on_time_until = self._seen_at + GAP_S

    def current_time(self) -> float:
        """Return the time. trio calls this after each sleep of the loop."""
        now = self._now()
        if now > self._on_time_until:
            self._skip(now)
        self._seen_at = now
        self._slept_s = 0.0
        self._on_time_until = now + GAP_S
        return self._offset + now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return how long the loop may sleep, which it then does."""
        sleep_s = max(0.0, deadline - self.current_time())
        self._slept_s = sleep_s
        self._on_time_until = self._seen_at + sleep_s + LATE_S
        return sleep_s

    def _skip(self, now: float) -> None:
        """Leave out the time until `now` in which the process did not run."""
        passed_s = now - self._seen_at
        late_s = passed_s - self._slept_s
        if late_s >= GAP_S and self._seen_at >= self._gap_ended_at + _RUNS_S:
            self._gap_ended_at = now
            self._offset -= passed_s - _COUNTED_S
            self.gap_at = self._offset + now
        elif self._slept_s >= _LEAST_REPEATED_S:
            self._offset -= late_s + min(self._slept_s / 2, _REST_S)


def had_gap_since(began_at: float) -> bool:
    """Whether this process did not run for a while since `began_at`, in trio's time."""
    clock = trio.lowlevel.current_clock()
    return isinstance(clock, LoopClock) and clock.gap_at >= began_at
