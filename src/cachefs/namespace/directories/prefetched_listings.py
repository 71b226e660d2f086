"""Complete directories that the listing of a directory above them has shown, kept for later use.

Importing a Python package reads hundreds of directories of a few names each, one after the other.
Where the origin shows a whole tree in one request, these directories need no request of their own.
"""

from collections import OrderedDict
from typing import NamedTuple

from cachefs.namespace.clock import Clock
from cachefs.types import Entry

_NAMES = 20_000
"""The most names kept, about 8 MB. The directories that were seen first are dropped first."""
_DIRECTORY_COST = 4
"""What a directory counts for in `_NAMES`, besides its own names."""


class PrefetchedListing(NamedTuple):
    """All entries of a directory, from a listing that began at `as_of_ns`."""

    as_of_ns: int
    entries: list[Entry]


class PrefetchedListings:
    """The prefetched directories by path, owned by `Listings`.

    Each is valid for `for_ns`. It is dropped earlier if a look-up finds that it has changed.
    """

    def __init__(self, clock: Clock, for_ns: float) -> None:
        self._clock = clock
        self.for_ns = for_ns
        self._seen: OrderedDict[str, PrefetchedListing] = OrderedDict()
        self._names = 0

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, directories: dict[str, list[Entry]], as_of_ns: int) -> None:
        """Add the directories that a listing which began at `as_of_ns` has shown below its own."""
        for path, entries in directories.items():
            known = self._seen.get(path)
            if known is None or known.as_of_ns < as_of_ns:
                self.drop(path)
                self._seen[path] = PrefetchedListing(as_of_ns, entries)
                self._names += len(entries) + _DIRECTORY_COST
        while self._seen and (self._names > _NAMES or not self._is_fresh(self._oldest())):
            self.drop(next(iter(self._seen)))

    def knows(self, path: str) -> bool:
        """Return whether the directory can be listed from here."""
        seen = self._seen.get(path)
        return seen is not None and self._is_fresh(seen)

    def take(self, path: str, since_ns: int) -> PrefetchedListing | None:
        """Remove and return the directory's entries, if they were seen at `since_ns` or later."""
        seen = self._seen.get(path)
        if seen is None or seen.as_of_ns < since_ns or not self._is_fresh(seen):
            return None
        self.drop(path)
        return seen

    def drop(self, path: str) -> None:
        """Drop the directory's entries: it has changed since, or is listed again."""
        seen = self._seen.pop(path, None)
        if seen is not None:
            self._names -= len(seen.entries) + _DIRECTORY_COST

    def _oldest(self) -> PrefetchedListing:
        return next(iter(self._seen.values()))

    def _is_fresh(self, seen: PrefetchedListing) -> bool:
        return self._clock.remaining_ns(seen.as_of_ns, self.for_ns) > 0
