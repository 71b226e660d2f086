"""Adds the relay's statistics to those of the daemon."""

from typing import Protocol

from cachefs.cache.publisher import Publisher
from cachefs.metrics import Requests


class TableCounters(Protocol):
    """The methods of `_relay.Table` that `RelayStats` calls."""

    def counters(self) -> dict[str, int]: ...
    def hit_times(self) -> list[int]: ...


class RelayStats:
    """Copies the relay's counters into the daemon's metrics. There is one per daemon.

    The table counts from the start of the mount, the daemon from its own start. So counts from
    before this object's creation are left out.
    """

    def __init__(self, table: TableCounters, publisher: Publisher, requests: Requests) -> None:
        self._table = table
        self._publisher = publisher
        self._hits = requests.histogram("read", "hit")
        self._known_times = table.hit_times()
        self._known_ns = table.counters()["hit_ns"]

    def update(self) -> None:
        """Add the hits since the last call to the histogram, the tiers and the cache."""
        self._publisher.count_hits()
        times, ns = self._table.hit_times(), self._table.counters()["hit_ns"]
        counts = self._hits.counts
        for bucket, (count, known) in enumerate(zip(times, self._known_times, strict=True)):
            counts[bucket] += count - known
        self._hits.sum_ns += ns - self._known_ns
        self._known_times, self._known_ns = times, ns

    def report(self) -> dict[str, int]:
        """Return the table's counters since the mount began, for the status."""
        return self._table.counters()
