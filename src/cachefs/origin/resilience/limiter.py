"""How many requests may be under way: a limit that gives way when the origin says so.

Additive increase, multiplicative decrease, as in TCP: nodes that know nothing of each other share
an origin fairly by it. A refusal takes away a seventh, counted from what was really under way, once
for all requests of that moment; a round of answers at the limit gives one back. (Taking away half
would leave a quarter of the origin's capacity unused on average, a seventh some 7 %.)
"""

from collections import deque

import trio

_DECREASE = 0.85


class AdaptiveLimit:
    """Between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._cut_at = float("-inf")

    @property
    def now(self) -> int:
        return int(self._limit)

    @property
    def most(self) -> int:
        return self._most

    @most.setter
    def most(self, most: int) -> None:
        # Unless it is held down, it follows.
        if self._limit >= self._most or self._limit > most:
            self._limit = float(most)
        self._most = most

    def served(self, in_flight: int) -> None:
        """An answer has come; `in_flight` counts its request too."""
        if in_flight >= self.now:
            self._limit = min(float(self._most), self._limit + 1 / self._limit)

    def refused(self, began_at: float, now: float, in_flight: int) -> None:
        """The origin had too much to do for the request sent at `began_at`."""
        if began_at < self._cut_at:
            return  # sent before the last refusal had any effect
        self._cut_at = now
        self._limit = max(1.0, min(self._limit, in_flight) * _DECREASE)


class Slots:
    """First come, first served, as many at a time as `limit` says."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        self.limit = limit
        self.in_flight = 0
        self._waiting: deque[trio.Event] = deque()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def try_take(self) -> bool:
        """A slot, if one is free and nobody waits for it."""
        if self._waiting or self.in_flight >= self.limit.now:
            return False
        self.in_flight += 1
        return True

    def ask(self) -> trio.Event:
        """A place in the queue; when it is set, its owner has a slot."""
        granted = trio.Event()
        self._waiting.append(granted)
        self.grant()
        return granted

    def withdraw(self, granted: trio.Event) -> None:
        """Give the place, or the slot that it has become, to others."""
        if granted.is_set():
            self.release()
        else:
            self._waiting.remove(granted)

    def release(self) -> None:
        self.in_flight -= 1
        self.grant()

    def grant(self) -> None:
        """To be called when the limit has risen, too."""
        while self._waiting and self.in_flight < self.limit.now:
            self.in_flight += 1
            self._waiting.popleft().set()
