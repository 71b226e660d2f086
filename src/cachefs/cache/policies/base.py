"""The interface of all policies, and what most of them share.

A policy sees slots, not keys. Its memory is `Slab.ticks`: four bytes a block. For most policies
a tick is the value of the mount's clock at the block's last use; the clock advances by one with
every block read, hit or miss. Ages are differences modulo 2**32, so that the clock may wrap: a
block unused for four thousand million reads looks young once, no more.

`on_hit` and `on_miss` are on the path of every read and must cost next to nothing.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from cachefs.tiers.slabs import USED, Slab
from cachefs.types import BlockKey

CLOCK_MASK = 0xFFFFFFFF

SAMPLE_BLOCKS = 512
"""Blocks looked at to find a threshold; with no more blocks than this the order is exact."""

Place = tuple[Slab, int]
"""A slab and one of its used slots."""


class History:
    """What is known of past reads, over all tiers of a mount."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0
        """The clock."""

    def on_miss(self, key: BlockKey) -> None:
        """A block was read that no tier holds."""
        self.now = (self.now + 1) & CLOCK_MASK

    def on_evict(self, key: BlockKey, age: int) -> None:
        """A block was dropped that had not been used for `age` reads."""


class EvictionPolicy:
    """One per tier. The base class goes by age: whatever was not used for longest goes first."""

    name: ClassVar[str]
    replaces: ClassVar[bool] = True
    """False: a resident block never goes to make room for another."""

    def __init__(self, history: History, seed: int | None = None) -> None:
        self._history = history
        self._random = random.Random(seed)

    def resume(self, tick: int) -> None:
        """Blocks of an earlier run have ticks up to `tick`."""
        self._history.now = max(self._history.now, tick)

    @property
    def now(self) -> int:
        """The tick of a block that is used right now."""
        return self._history.now

    def on_admit(self, slab: Slab, slot: int, age: int) -> None:
        """The slot has just got its block, which was used `age` reads ago (in another tier)."""
        slab.ticks[slot] = (self._history.now - age) & CLOCK_MASK

    def on_hit(self, slab: Slab, slot: int) -> None:
        """The block was read."""
        history = self._history
        history.now = slab.ticks[slot] = (history.now + 1) & CLOCK_MASK

    def age(self, slab: Slab, slot: int) -> int:
        """Reads since the block was last used."""
        return (self._history.now - slab.ticks[slot]) & CLOCK_MASK

    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        """How to give up about `fraction` (at least one) of all blocks of `slabs`.

        The answer is for `victims`. None: nothing may go. Looks at `sample_blocks`, about 1.5 us
        each.
        """
        ages = self._oldest_first(slabs, sample_blocks)
        return ages[rank_of(ages, fraction)] if ages else None

    def victims(self, slab: Slab, plan: float, first: int, stop: int) -> list[int]:
        """Used slots of [first, stop) that the plan gives up; none that is kept."""
        slots = list(slab.loose_slots(first, stop))
        ticks, now = slab.ticks, self._history.now
        return [slot for slot in slots if (now - ticks[slot]) & CLOCK_MASK >= plan]

    def worth(self, slab: Slab) -> float:
        """What emptying the slab would lose; the slab with the least is emptied first."""
        ages = [self.age(slab, slot) for slot in self._sample_slab(slab, 16)]
        return slab.loose_count / (1 + sum(ages) / len(ages)) if ages else 0.0

    def may_empty(self, slab: Slab) -> bool:
        """Whether all blocks of the slab may go so that another class of sizes gets its space."""
        return self.replaces

    def oldest_age(self, slabs: Sequence[Slab]) -> int:
        """About the age of the tier's oldest blocks: the 95th percentile. 0 if it has none."""
        ages = self._oldest_first(slabs, 64)
        return ages[len(ages) // 20] if ages else 0

    # -- sampling ------------------------------------------------------------------------------

    def _oldest_first(self, slabs: Sequence[Slab], most: int = SAMPLE_BLOCKS) -> list[int]:
        return sorted((self.age(*place) for place in self._sample(slabs, most)), reverse=True)

    def _sample(self, slabs: Sequence[Slab], most: int = SAMPLE_BLOCKS) -> list[Place]:
        """All used slots that aren't kept if they are no more than `most`; else that many, each
        as likely."""
        counts = [slab.used_count - slab.kept_count for slab in slabs]
        if sum(counts) <= most:
            return [(slab, slot) for slab in slabs for slot in slab.loose_slots()]
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
        """`count` used slots that aren't kept (the same may come twice), each found from a random
        one onwards."""
        if slab.loose_count == 0:
            return []
        slab.hydrate()
        find, chance, slot_count = slab.state.find, self._random.random, slab.slot_count
        slots = []
        for _ in range(count):
            slot = find(USED, int(chance() * slot_count))
            slots.append(slot if slot >= 0 else find(USED))
        return slots


def rank_of(sample: Sequence[object], fraction: float) -> int:
    """The position in a non-empty sorted sample up to which about `fraction` of it lies."""
    return min(len(sample), max(1, round(len(sample) * fraction))) - 1
