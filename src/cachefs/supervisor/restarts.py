"""How long the supervisor waits before it starts the next daemon."""

import time
from collections import deque

MOST_FAILURES, FAILURES_WITHIN_S = 5, 60.0
"""So many failures of one kind within this time end the mount."""
_FIRST_PAUSE_S = 0.25
"""The pause before the next start, if a daemon failed early or several crashed."""
_BARELY_S = 0.2
"""A daemon that ends this soon after it was ready counts as one that failed early."""


class RecentFailures:
    """The times of the latest failures of one kind."""

    def __init__(self) -> None:
        self._failed_s: deque[float] = deque(maxlen=MOST_FAILURES)

    def add(self) -> int:
        """Note a failure, and return how many there were within `FAILURES_WITHIN_S`."""
        now_s = time.monotonic()
        self._failed_s.append(now_s)
        return sum(now_s < failed_s + FAILURES_WITHIN_S for failed_s in self._failed_s)


def pause_after_end_s(ready_for_s: float) -> float:
    """Return the pause after a daemon that ended by itself, `ready_for_s` after it was ready."""
    return _FIRST_PAUSE_S if ready_for_s < _BARELY_S else 0.0


def pause_after_crash_s(crashes: int) -> float:
    """Return the pause after the latest of so many crashes of ready daemons."""
    return _FIRST_PAUSE_S * 2.0 ** (crashes - 2) if crashes > 1 else 0.0


def pause_after_failure_s(failures: int) -> float:
    """Return the pause after the latest of so many daemons that could not begin: at most 2 s, as
    `MOST_FAILURES` end the mount."""
    return _FIRST_PAUSE_S * 2.0 ** (failures - 1)
