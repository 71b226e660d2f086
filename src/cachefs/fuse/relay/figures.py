"""What the relay did, added to what we count ourselves."""

from typing import Protocol

from cachefs.cache.sharing import SharedBlocks
from cachefs.metrics import Requests


class Table(Protocol):
    """What is used of `_relay.Table`."""

    def counters(self) -> dict[str, int]: ...
    def hit_times(self) -> list[int]: ...


class RelayFigures:
    """One per daemon. The table counts since the mount began, and we since the daemon did: what
    came before us is left out."""

    def __init__(self, table: Table, shared: SharedBlocks, requests: Requests) -> None:
        self._table = table
        self._shared = shared
        self._hits = requests.histogram("read", "hit")
        self._known_times = table.hit_times()
        self._known_ns = table.counters()["hit_ns"]

    def update(self) -> None:
        """Bring histogram, tiers and cache up to date."""
        self._shared.count_hits()
        times, ns = self._table.hit_times(), self._table.counters()["hit_ns"]
        counts = self._hits.counts
        for bucket, (count, known) in enumerate(zip(times, self._known_times, strict=True)):
            counts[bucket] += count - known
        self._hits.sum_ns += ns - self._known_ns
        self._known_times, self._known_ns = times, ns

    def report(self) -> dict[str, int]:
        """For the status: the table's counters."""
        return self._table.counters()
