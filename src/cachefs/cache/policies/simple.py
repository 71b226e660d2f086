"""The policies that need no history of reads, only the ages of blocks."""

from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import SAMPLE_BLOCKS, EvictionPolicy
from cachefs.cache_dir.slab import Slab


class LruPolicy(EvictionPolicy):
    """Evict the least recently used blocks, by sampled ages.

    For workloads that soon read the same blocks again. It performs badly in shuffled epochs.
    """

    name = "lru"


class NoReplacement(EvictionPolicy):
    """Fill the cache, then keep the blocks that are there.

    The best policy for one data set that never changes. It never makes room for another.
    """

    name = "none"
    replaces = False

    @override
    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        return None


class TwoRandomPolicy(EvictionPolicy):
    """Evict the older of two random blocks: the default of JuiceFS, here for comparison.

    Its plan is the share of blocks to evict, from 0 to 1.
    """

    name = "2-random"

    @override
    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        total = sum(slab.evictable_count for slab in slabs)
        return max(fraction, 1 / total) if total else None

    @override
    def victims(self, slab: Slab, plan: float, first: int, stop: int) -> list[int]:
        slots = list(slab.evictable_slots(first, stop))
        wanted = len(slots) * plan
        count = int(wanted) + (self._random.random() < wanted % 1)
        chosen = set()
        for _ in range(count):
            pair = self._random.choices(slots, k=2)
            chosen.add(max(pair, key=lambda slot: self.age(slab, slot)))
        return sorted(chosen)
