"""SIEVE (Zhang et al., NSDI 2024): first in, first out, but what was read again stays.

A hand moves from the oldest block to the newest; what was not read since the hand last passed
goes, what was read stays where it is in the order and must be read anew before the next pass.
Here the hand moves over many blocks at a time: a plan is how far.

A tick is the place in the order of arrival, with the lowest bit set if the block was read since.
"""

from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import SAMPLE_BLOCKS, EvictionPolicy, History
from cachefs.tiers.slabs import Slab

_ORDER_MASK = 0x7FFFFFFF


class SievePolicy(EvictionPolicy):
    """For skewed reads: it keeps what is popular better than LRU, at less cost."""

    name = "sieve"

    def __init__(self, history: History, seed: int | None = None) -> None:
        super().__init__(history, seed)
        self._hand = 0
        self._step = 0
        """How far the hand moves with the plan that is being carried out."""

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
        """Arrivals since the block's own."""
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
        # With too little unread the hand goes all the way round, and what is left was forgotten.
        reach = unread[wanted - 1] if wanted <= len(unread) else sample[-1][0]
        self._step = reach + 1
        return reach

    def _distance(self, tick: int) -> tuple[int, int]:
        return ((tick >> 1) - self._hand) & _ORDER_MASK, tick & 1

    @override
    def victims(self, slab: Slab, plan: float, first: int, stop: int) -> list[int]:
        ticks, hand = slab.ticks, self._hand
        chosen = []
        for slot in slab.loose_slots(first, stop):
            tick = ticks[slot]
            if ((tick >> 1) - hand) & _ORDER_MASK > plan:
                continue
            if tick & 1:
                ticks[slot] = tick & ~1
            else:
                chosen.append(slot)
        return chosen
