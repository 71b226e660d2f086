"""Bounded listings that have reached their last page, kept for as long as they may continue."""

from collections import OrderedDict

from cachefs.namespace.clock import Clock
from cachefs.namespace.directories.lister import ListingProgress
from cachefs.namespace.outage import NS

_MOST = 16
"""The most paused listings kept. The oldest are dropped first."""
_PAUSED_NS = 30 * NS
"""How long after its beginning a listing may continue: its first names are that old."""


class PausedListings:
    """The paused listings by directory, owned by `Listings`. None is older than the list TTL."""

    def __init__(self, clock: Clock, list_ttl_ns: float) -> None:
        self._clock = clock
        self._paused: OrderedDict[int, ListingProgress] = OrderedDict()
        self.list_ttl_ns = list_ttl_ns

    def __contains__(self, ino: int) -> bool:
        return ino in self._paused

    def add(self, ino: int, progress: ListingProgress) -> None:
        """Keep a listing that has paused."""
        self._paused[ino] = progress
        if len(self._paused) > _MOST:
            self._paused.popitem(last=False)

    def drop(self, ino: int) -> None:
        """Drop the directory's listing, if there is one: what it has seen is no longer true."""
        self._paused.pop(ino, None)

    def take(self, ino: int, since_ns: int) -> ListingProgress | None:
        """Remove the directory's listing. Return it if it began at `since_ns` or later, and if it
        is young enough to continue."""
        progress = self._paused.pop(ino, None)
        if progress is None:
            return None
        as_of_ns = progress.snapshot.as_of_ns
        for_ns = min(_PAUSED_NS, self.list_ttl_ns)
        if as_of_ns < since_ns or self._clock.remaining_ns(as_of_ns, for_ns) <= 0:
            return None
        return progress
