"""Fill the cache, then keep the blocks that are there."""

from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import SAMPLE_BLOCKS, EvictionPolicy
from cachefs.cache_dir.slab import Slab


class NoReplacement(EvictionPolicy):
    """The best policy for one data set that never changes. It never makes room for another."""

    name = "none"
    replaces = False

    @override
    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        return None
