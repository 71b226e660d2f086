"""Fill up, then keep what is there."""

from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import SAMPLE_BLOCKS, EvictionPolicy
from cachefs.tiers.slabs import Slab


class NoReplacement(EvictionPolicy):
    """The best for one data set for ever; it never makes room for the next."""

    name = "none"
    replaces = False

    @override
    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        return None
