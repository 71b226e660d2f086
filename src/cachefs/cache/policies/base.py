"""The interface of all policies, and what most of them share.

A policy works on slots, not on keys. Its state is `Slab.ticks`: four bytes per block. For most
policies a tick is the value of the mount's clock at the last use of the block. The clock advances
by one with every block read, hit or miss. Ages are differences modulo 2**32, so the clock may
wrap: a block that is unused for 2**32 reads looks young once, and there is no other effect.

Every read calls `on_hit` or `on_miss`, so they must be very cheap.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from cachefs.cache_dir.slab import USED, Slab
from cachefs.types import BlockKey

CLOCK_MASK = 0xFFFFFFFF

SAMPLE_BLOCKS = 512
"""Blocks to sample for a threshold. With no more blocks than this, the order is exact."""

UsedSlot = tuple[Slab, int]
"""A slab and one of its used slots."""


class History:
    """The clock and what a policy stores about past reads. One per mount; all tiers share it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0
        """The clock: block reads so far, modulo 2**32 (the SIEVE policy counts arrivals)."""

    def on_miss(self, key: BlockKey) -> None:
        """Record the read of a block that no tier holds."""
        self.now = (self.now + 1) & CLOCK_MASK

    def on_evict(self, key: BlockKey, age: int) -> None:
        """Record that a block was dropped `age` block reads after its last use."""


class EvictionPolicy:
    """Decides which blocks of one tier to evict; the `TierStore` owns it. This base class evicts
    the blocks first that were unused for longest."""

    name: ClassVar[str]
    replaces: ClassVar[bool] = True
    """False if the policy never evicts a resident block to make room for another."""

    def __init__(self, history: History, seed: int | None = None) -> None:
        self._history = history
        self._random = random.Random(seed)

    def resume(self, tick: int) -> None:
        """Advance the clock to at least `tick`, the highest tick of an earlier run."""
        self._history.now = max(self._history.now, tick)

    @property
    def now(self) -> int:
        """The tick of a block that is used now."""
        return self._history.now

    def on_admit(self, slab: Slab, slot: int, age: int) -> None:
        """Set the tick of a slot that has just got its block. The block was last used `age` block
        reads ago, in another tier or while it waited for its slot."""
        slab.ticks[slot] = (self._history.now - age) & CLOCK_MASK

    def on_hit(self, slab: Slab, slot: int) -> None:
        """Record a read of the slot's block."""
        history = self._history
        history.now = slab.ticks[slot] = (history.now + 1) & CLOCK_MASK

    def age(self, slab: Slab, slot: int) -> int:
        """Return the number of block reads since the last use of the slot's block."""
        return (self._history.now - slab.ticks[slot]) & CLOCK_MASK

    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        """Return a plan that evicts about `fraction` (at least one) of all blocks of `slabs`.

        Pass the plan to `victims`. None means that no block may be evicted. The method samples
        `sample_blocks` blocks, at about 1.5 us each.
        """
        ages = self._oldest_first(slabs, sample_blocks)
        return ages[rank_of(ages, fraction)] if ages else None

    def victims(self, slab: Slab, plan: float, first: int, stop: int) -> list[int]:
        """Return the slots of [first, stop) whose blocks the plan evicts. Pinned blocks are
        never among them."""
        slots = list(slab.evictable_slots(first, stop))
        ticks, now = slab.ticks, self._history.now
        return [slot for slot in slots if (now - ticks[slot]) & CLOCK_MASK >= plan]

    def worth(self, slab: Slab) -> float:
        """Return the loss from emptying the slab; the slab with the smallest loss is emptied
        first. No unit: evictable blocks divided by their average age."""
        ages = [self.age(slab, slot) for slot in self._sample_slab(slab, 16)]
        return slab.evictable_count / (1 + sum(ages) / len(ages)) if ages else 0.0

    def may_empty(self, slab: Slab) -> bool:
        """Return whether all blocks of the slab may be dropped to give it to another slot class."""
        return self.replaces

    def oldest_age(self, slabs: Sequence[Slab]) -> int:
        """Return about the age of the oldest blocks of the tier: the 95th percentile of a sample of
        64. 0 if there are no evictable blocks."""
        ages = self._oldest_first(slabs, 64)
        return ages[len(ages) // 20] if ages else 0

    # -- sampling ------------------------------------------------------------------------------

    def _oldest_first(self, slabs: Sequence[Slab], most: int = SAMPLE_BLOCKS) -> list[int]:
        return sorted((self.age(*used) for used in self._sample(slabs, most)), reverse=True)

    def _sample(self, slabs: Sequence[Slab], most: int = SAMPLE_BLOCKS) -> list[UsedSlot]:
        """Return all evictable slots if they are no more than `most`; otherwise `most` of them,
        all with about the same probability."""
        counts = [slab.used_count - slab.pinned_count for slab in slabs]
        if sum(counts) <= most:
            return [(slab, slot) for slab in slabs for slot in slab.evictable_slots()]
        sums = list(accumulate(counts))
        picks: dict[int, int] = {}
        for position in self._random.choices(range(len(slabs)), cum_weights=sums, k=most):
            picks[position] = picks.get(position, 0) + 1
        return [
            (slabs[position], slot)
            for position, count in picks.items()
            for slot in self._sample_slab(slabs[position], count)
        ]

    def _sample_slab(self, slab: Slab, count: int) -> list[int]:
        """Return `count` evictable slots; one may occur twice. Each is the first evictable slot at
        or after a random position."""
        if slab.evictable_count == 0:
            return []
        slab.hydrate()
        find, chance, slot_count = slab.state.find, self._random.random, slab.slot_count
        slots = []
        for _ in range(count):
            slot = find(USED, int(chance() * slot_count))
            slots.append(slot if slot >= 0 else find(USED))
        return slots


def rank_of(sample: Sequence[object], fraction: float) -> int:
    """Return the last index of the first `fraction` of a non-empty sorted sample."""
    return min(len(sample), max(1, round(len(sample) * fraction))) - 1
