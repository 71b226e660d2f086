"""An adaptive limit on the number of requests in flight, which falls when the origin is overloaded.

It uses additive increase and multiplicative decrease, as TCP does, so that nodes share an origin
fairly without communicating. A refusal lowers the limit to 0.85 of the requests that were really in
flight, once for all requests sent before that decrease. One round of answers at the limit raises it
by one. (Halving would leave a quarter of the origin's capacity unused on average; 0.85 about 7 %.)
"""

from bisect import insort
from typing import NamedTuple

import trio

from cachefs.types import READER_TURN, Priority, Turn

_DECREASE = 0.85


class AdaptiveLimit:
    """The limit that applies now: between 1 and `most`."""

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
        # The current limit follows `most`, unless refusals have lowered it below both values.
        if self._limit >= self._most or self._limit > most:
            self._limit = float(most)
        self._most = most

    def served(self, in_flight: int) -> None:
        """Record an answer; `in_flight` includes its request."""
        if in_flight >= self.now:
            self._limit = min(float(self._most), self._limit + 1 / self._limit)

    def refused(self, began_at: float, now: float, in_flight: int) -> None:
        """Record that the origin was overloaded for the request sent at `began_at`."""
        if began_at < self._cut_at:
            return  # sent before the last decrease, so it says nothing about the new limit
        self._cut_at = now
        self._limit = max(1.0, min(self._limit, in_flight) * _DECREASE)


class _Asked(NamedTuple):
    turn: Turn
    granted: trio.Event


def _priority(asked: _Asked) -> Priority:
    return asked.turn.priority


class RequestSlots:
    """Gives slots for requests in order of priority, and of arrival among equals. At most
    `limit.now` are granted at a time."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        self.limit = limit
        self.in_flight = 0
        self._waiting: list[_Asked] = []

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def try_take(self) -> bool:
        """Take a slot if one is free and no request waits for it. Return whether it was taken."""
        if self._waiting or self.in_flight >= self.limit.now:
            return False
        self.in_flight += 1
        return True

    def ask(self, turn: Turn = READER_TURN) -> trio.Event:
        """Join the queue. Return an event that is set when the caller owns a slot."""
        granted = trio.Event()
        insort(self._waiting, _Asked(turn, granted), key=_priority)
        self.grant()
        return granted

    def withdraw(self, granted: trio.Event) -> None:
        """Leave the queue, or release the slot if it has been granted already."""
        if granted.is_set():
            self.release()
        else:
            self._waiting = [asked for asked in self._waiting if asked.granted is not granted]

    def reorder(self) -> None:
        """Note that the priority of turns has risen."""
        self._waiting.sort(key=_priority)

    def release(self) -> None:
        self.in_flight -= 1
        self.grant()

    def grant(self) -> None:
        """Give free slots to the queue. Must also be called when the limit has risen."""
        while self._waiting and self.in_flight < self.limit.now:
            self.in_flight += 1
            self._waiting.pop(0).granted.set()
