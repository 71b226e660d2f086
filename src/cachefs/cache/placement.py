"""Which tier a block calls its home. Pure.

With tiers of equal rank a block goes to one of them by rendezvous hashing, each tier's chance
being its share of the quotas: a tier that is added or removed moves no more blocks than it must.
A block may also be found away from home (after such a change), so look-ups ask home first, then
the others.
"""

import math
from collections.abc import Sequence

import xxhash

from cachefs.types import BlockKey


class Placement:
    """`names` are stable over restarts (the tiers' uuids), `weights` their quotas."""

    def __init__(self, names: Sequence[bytes], weights: Sequence[int]) -> None:
        self._seeds = [xxhash.xxh3_64_intdigest(name) for name in names]
        self._weights = list(weights)

    def order(self, key: BlockKey) -> list[int]:
        """Indices of all tiers, the block's home first."""
        if len(self._seeds) == 1:
            return [0]
        scores = [
            self._score(key, seed, weight)
            for seed, weight in zip(self._seeds, self._weights, strict=True)
        ]
        return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)

    @staticmethod
    def _score(key: BlockKey, seed: int, weight: int) -> float:
        digest = xxhash.xxh3_64_intdigest(
            key.object_id + key.block_index.to_bytes(4, "big"), seed=seed
        )
        return -weight / math.log((digest + 1) / (2**64 + 2))
