"""The files that a job fetches: those found while it still looks for others, then the rest."""

from collections import deque
from collections.abc import Iterator

import trio

from cachefs.types import ObjectRef


class FileQueue:
    """File versions in the order in which a job fetches them. `Job` fills it, `Fetcher` empties
    it."""

    def __init__(self) -> None:
        self._first: deque[ObjectRef] = deque()
        self._rest: Iterator[ObjectRef] | None = None
        self._has_ended = False
        self._changed = trio.Event()

    def put(self, ref: ObjectRef) -> None:
        """Add a file. Call this only before `end`."""
        self._first.append(ref)
        self._wake()

    def end(self, rest: Iterator[ObjectRef]) -> None:
        """Add all files of `rest`, which is read as they are taken. No others follow."""
        self._rest = rest
        self._wake()

    def take(self) -> ObjectRef | None:
        """Return the next file; None if there is none at the moment."""
        if self._first:
            return self._first.popleft()
        ref = None if self._rest is None else next(self._rest, None)
        self._has_ended = ref is None and self._rest is not None
        return ref

    async def has_ended(self) -> bool:
        """Call this after `take` has returned None. Wait until there may be another file and return
        False, or return True if none follows."""
        if not self._has_ended:
            await self._changed.wait()
        return self._has_ended

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
