"""What to replace, and what to let in. Pure: no I/O, no waiting.

A policy sees slots, not keys. Its memory is `Slab.ticks`: four bytes a block, holding the value
of a clock that advances by one with every use. Ages are differences modulo 2**32, so that the
clock may wrap: a block unused for four thousand million uses looks young once, no more.
"""

import random
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from cachefs.tiers.slabs import Slab
from cachefs.types import BlockKey

SAMPLE_BLOCKS = 2048
"""Ages looked at to find the threshold; with no more blocks than this the order is exact."""

_CLOCK_MASK = 0xFFFFFFFF


class EvictionPolicy(Protocol):
    """One per tier. `on_hit` is on the path of every cached read: it must cost next to nothing."""

    name: str
    clock: int
    evicts: bool
    """False: a resident block is never replaced."""

    def on_admit(self, slab: Slab, slot: int) -> None:
        """The slot has just got its block."""

    def on_hit(self, slab: Slab, slot: int) -> None:
        """The block was read."""

    def on_remove(self, slab: Slab, slot: int) -> None:
        """The block is gone, for whatever reason."""

    def admits(self, key: BlockKey, length: int, must_replace: bool) -> bool:
        """Whether a fetched block may be stored; `must_replace` if another has to go for it."""

    def plan(self, slabs: Sequence[Slab], fraction: float) -> int | None:
        """The age from which on blocks may go, so that about `fraction` of all blocks do.

        None: nothing may go. The answer is good until the next `plan`.
        """

    def victims(self, slab: Slab, plan: int, first: int, stop: int) -> list[int]:
        """Used slots of [first, stop) that the plan gives up."""

    def worth(self, slab: Slab) -> float:
        """What emptying the slab would lose; the slab with the least is emptied first."""


class LruPolicy(EvictionPolicy):
    """Least recently used, in order of sampled ages."""

    name = "lru"
    evicts = True

    def __init__(self, clock: int = 0, seed: int | None = None) -> None:
        self.clock = clock & _CLOCK_MASK
        self._random = random.Random(seed)

    @override
    def on_admit(self, slab: Slab, slot: int) -> None:
        self.on_hit(slab, slot)

    @override
    def on_hit(self, slab: Slab, slot: int) -> None:
        self.clock = slab.ticks[slot] = (self.clock + 1) & _CLOCK_MASK

    @override
    def on_remove(self, slab: Slab, slot: int) -> None:
        pass

    @override
    def admits(self, key: BlockKey, length: int, must_replace: bool) -> bool:
        return True

    @override
    def plan(self, slabs: Sequence[Slab], fraction: float) -> int | None:
        ages = self._ages(slabs)
        if not ages:
            return None
        ages.sort(reverse=True)
        wanted = min(len(ages), max(1, round(len(ages) * fraction)))
        return ages[wanted - 1]

    @override
    def victims(self, slab: Slab, plan: int, first: int, stop: int) -> list[int]:
        slots = list(slab.used_slots(first, stop))
        ticks, clock = slab.ticks, self.clock
        return [slot for slot in slots if (clock - ticks[slot]) & _CLOCK_MASK >= plan]

    @override
    def worth(self, slab: Slab) -> float:
        ages = self._sample(slab, 16)
        return slab.used_count / (1 + sum(ages) / len(ages)) if ages else 0.0

    def _ages(self, slabs: Sequence[Slab]) -> list[int]:
        total = sum(slab.used_count for slab in slabs)
        if total <= SAMPLE_BLOCKS:
            return [
                (self.clock - slab.ticks[slot]) & _CLOCK_MASK
                for slab in slabs
                for slot in slab.used_slots()
            ]
        ages: list[int] = []
        weights = [slab.used_count for slab in slabs]
        picks: dict[int, int] = {}
        for position in self._random.choices(range(len(slabs)), weights, k=SAMPLE_BLOCKS):
            picks[position] = picks.get(position, 0) + 1
        for position, count in picks.items():
            ages.extend(self._sample(slabs[position], count))
        return ages

    def _sample(self, slab: Slab, count: int) -> list[int]:
        """Ages of `count` used slots, each found from a random place onwards."""
        ages: list[int] = []
        if slab.used_count == 0:
            return ages
        for _ in range(count):
            start = self._random.randrange(slab.slot_count)
            slot = next(slab.used_slots(start), None)
            if slot is None:
                slot = next(slab.used_slots(), None)
            if slot is not None:
                ages.append((self.clock - slab.ticks[slot]) & _CLOCK_MASK)
        return ages


class NoEviction(LruPolicy):
    """Fill up, then keep what is there."""

    name = "none"
    evicts = False

    @override
    def admits(self, key: BlockKey, length: int, must_replace: bool) -> bool:
        return not must_replace

    @override
    def plan(self, slabs: Sequence[Slab], fraction: float) -> int | None:
        return None


POLICIES: dict[str, type[LruPolicy]] = {"lru": LruPolicy, "none": NoEviction}


def make_policy(name: str, clock: int = 0) -> EvictionPolicy:
    """Raises `KeyError` for a name that isn't in `POLICIES`; the configuration checks it."""
    return POLICIES[name](clock)
