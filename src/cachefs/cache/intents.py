"""What users want of blocks that are not in a tier yet, or are on their way to another.

One for all tiers of a mount. It is asked in the step in which a block enters a tier (`store.py`),
and small: it names objects that a job works on right now, never all that is cached.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import trio

from cachefs.types import BlockKey, ObjectRef

_MOST_LOST = 65_536
_MOST_EVICTED = 10_000
_FORGET_EVICTED_S = 600.0
"""Longer than any block is under way."""


class Intents:
    """See the module docstring. Every method is atomic on the loop."""

    def __init__(self) -> None:
        self._keeping: Counter[bytes] = Counter()
        self._lost: set[BlockKey] = set()
        """Kept blocks that turned out to be damaged: kept again when they were fetched again."""
        self._evicted: dict[bytes, float] = {}
        """Objects that had blocks under way when they were evicted, and when that was."""

    @contextmanager
    def keeping(self, refs: Iterable[ObjectRef]) -> Iterator[None]:
        """Blocks of these object versions that enter a tier meanwhile are kept."""
        object_ids = [ref.object_id for ref in refs]
        self._keeping.update(object_ids)
        try:
            yield
        finally:
            for object_id in object_ids:
                self._keeping[object_id] -= 1
                if self._keeping[object_id] == 0:
                    del self._keeping[object_id]

    def wants_kept(self, key: BlockKey) -> bool:
        """Whether the block is to be kept when it enters a tier."""
        return bool(self._keeping and key[0] in self._keeping) or (
            bool(self._lost) and key in self._lost
        )

    def note_lost(self, key: BlockKey) -> None:
        """A kept block was damaged and is gone."""
        if len(self._lost) < _MOST_LOST:
            self._lost.add(key)

    def note_unkept(self, object_ids: Set[bytes]) -> None:
        """Blocks of these objects aren't wanted kept any more."""
        if self._lost:
            self._lost = {key for key in self._lost if key[0] not in object_ids}

    def note_entered(self, key: BlockKey) -> None:
        """The block is in a tier."""
        self._lost.discard(key)

    def note_evicted(self, object_ids: Iterable[bytes]) -> None:
        """What is under way of these objects now must not enter a tier any more."""
        now_s = trio.current_time()
        if len(self._evicted) > _MOST_EVICTED:
            self._evicted = {
                object_id: evicted_s
                for object_id, evicted_s in self._evicted.items()
                if evicted_s > now_s - _FORGET_EVICTED_S
            }
        self._evicted.update(dict.fromkeys(object_ids, now_s))

    def is_unwanted(self, key: BlockKey, began_at: float) -> bool:
        """Whether the object was evicted after its block was found, or its fetch begun."""
        return bool(self._evicted) and self._evicted.get(key[0], -1.0) >= began_at
