"""The admission filter: which blocks to pin or refuse when they enter a tier.

All tiers of a mount share one filter. It concerns blocks that are in no tier yet or move between
tiers, and is evaluated in the loop step in which a block enters a tier (`store.py`). It is small:
it has entries for the objects of current jobs only, never for the whole cache.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import trio

from cachefs.types import BlockKey, ObjectRef

_MOST_LOST = 65_536
_MOST_EVICTED = 10_000
_FORGET_EVICTED_S = 600.0
"""Longer than any block needs from its fetch to a tier."""


class AdmissionFilter:
    """See the module docstring. Every method is atomic on the loop."""

    def __init__(self) -> None:
        self._pinning: Counter[bytes] = Counter()
        self._lost: set[BlockKey] = set()
        """Damaged blocks that were pinned: they are pinned again after a new fetch."""
        self._evicted: dict[bytes, float] = {}
        """Objects that had blocks under way when they were evicted -> time of that eviction."""

    @contextmanager
    def pinning(self, refs: Iterable[ObjectRef]) -> Iterator[None]:
        """Pin all blocks of these object versions that enter a tier while the context is open."""
        object_ids = [ref.object_id for ref in refs]
        self._pinning.update(object_ids)
        try:
            yield
        finally:
            for object_id in object_ids:
                self._pinning[object_id] -= 1
                if self._pinning[object_id] == 0:
                    del self._pinning[object_id]

    def must_be_pinned(self, key: BlockKey) -> bool:
        """Whether the block must be pinned when it enters a tier."""
        return bool(self._pinning and key[0] in self._pinning) or (
            bool(self._lost) and key in self._lost
        )

    def note_lost(self, key: BlockKey) -> None:
        """Record that a pinned block was damaged and dropped."""
        if len(self._lost) < _MOST_LOST:
            self._lost.add(key)

    def note_unpinned(self, object_ids: Set[bytes]) -> None:
        """Record that blocks of these objects need not be pinned again after damage."""
        if self._lost:
            self._lost = {key for key in self._lost if key[0] not in object_ids}

    def note_entered(self, key: BlockKey) -> None:
        """Record that the block has entered a tier."""
        self._lost.discard(key)

    def note_evicted(self, object_ids: Iterable[bytes]) -> None:
        """Refuse from now on the blocks of these objects that are already under way to a tier."""
        now_s = trio.current_time()
        if len(self._evicted) > _MOST_EVICTED:
            self._evicted = {
                object_id: evicted_s
                for object_id, evicted_s in self._evicted.items()
                if evicted_s > now_s - _FORGET_EVICTED_S
            }
        self._evicted.update(dict.fromkeys(object_ids, now_s))

    def is_unwanted(self, key: BlockKey, began_at: float) -> bool:
        """Whether the object was evicted at or after `began_at` (`Candidate.began_at`)."""
        return bool(self._evicted) and self._evicted.get(key[0], -1.0) >= began_at
