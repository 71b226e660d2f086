"""SIEVE (Zhang et al., NSDI 2024): first in, first out, except for blocks that were read again.

A hand moves from the oldest block to the newest. It evicts a block that was not read since the
hand last passed. A block that was read stays at its place in the order, and stays at the next pass
only if it is read again before. Here the hand moves over many blocks at a time; a plan is the
distance.

The upper 31 bits of a tick are the block's place in the order of arrival. The lowest bit is set if
the block was read since the hand last passed.
"""

from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import SAMPLE_BLOCKS, EvictionPolicy, History
from cachefs.cache_dir.slab import Slab

_ORDER_MASK = 0x7FFFFFFF


class SievePolicy(EvictionPolicy):
    """For skewed reads: it keeps popular blocks better than LRU does, at a lower cost."""

    name = "sieve"

    def __init__(self, history: History, seed: int | None = None) -> None:
        super().__init__(history, seed)
        self._hand = 0
        self._step = 0
        """Distance that the hand moves with the present plan."""

    @override
    def resume(self, tick: int) -> None:
        super().resume(tick >> 1)

    @property
    @override
    def now(self) -> int:
        return self._history.now << 1

    @override
    def on_admit(self, slab: Slab, slot: int, age: int) -> None:
        history = self._history
        history.now = (history.now + 1) & _ORDER_MASK
        slab.ticks[slot] = history.now << 1

    @override
    def on_hit(self, slab: Slab, slot: int) -> None:
        slab.ticks[slot] |= 1

    @override
    def age(self, slab: Slab, slot: int) -> int:
        """Return the number of arrivals since the block's own."""
        return (self._history.now - (slab.ticks[slot] >> 1)) & _ORDER_MASK

    @override
    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        self._hand = (self._hand + self._step) & _ORDER_MASK
        sample = sorted(
            self._distance(slab.ticks[slot]) for slab, slot in self._sample(slabs, sample_blocks)
        )
        if not sample:
            self._step = 0
            return None
        wanted = max(1, round(len(sample) * fraction))
        unread = [distance for distance, was_read in sample if not was_read]
        # If too few blocks are unread, the hand passes all blocks and clears their read bits. The
        # next pass can evict them.
        reach = unread[wanted - 1] if wanted <= len(unread) else sample[-1][0]
        self._step = reach + 1
        return reach

    def _distance(self, tick: int) -> tuple[int, int]:
        return ((tick >> 1) - self._hand) & _ORDER_MASK, tick & 1

    @override
    def victims(self, slab: Slab, plan: float, first: int, stop: int) -> list[int]:
        ticks, hand = slab.ticks, self._hand
        chosen = []
        for slot in slab.evictable_slots(first, stop):
            tick = ticks[slot]
            if ((tick >> 1) - hand) & _ORDER_MASK > plan:
                continue
            if tick & 1:
                ticks[slot] = tick & ~1
            else:
                chosen.append(slot)
        return chosen
