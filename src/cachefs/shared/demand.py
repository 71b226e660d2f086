"""Which share of the blocks the shared tier keeps, if it is smaller than the data.

All nodes read all data in a fresh order in each epoch. If a cache smaller than the data drops what
was used longest ago, it drops nearly everything before it is read again. So only the blocks below a
limit of their hash are kept: then the hit ratio is the share that fits, and the nodes need not talk
to each other.

The size of the data is estimated from a sample of the blocks that this node asked for lately: those
with the lowest hashes, at most `_SAMPLED`. So the estimate has an error of about 2 %.
"""

import heapq
import math
from collections.abc import Callable

import trio

from cachefs.types import BlockKey

_SAMPLED = 4096
_REMEMBERED_S = 24 * 3600.0
"""Blocks that this node has not asked for within a day don't count as data in use."""
_PER_TURN = 256
"""Blocks looked up between two checkpoints of the loop."""


class Demand:
    """The blocks that one node has asked for. Only the event loop uses it."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        """What all members hold together; 0 means that it is at least as much as the data."""
        self.share = 1.0
        """The blocks whose `hash_share` is less are kept in the shared tier."""
        self.is_local: Callable[[BlockKey], bool] = lambda _: False
        """Whether a block is in the cache of this node. The `BlockCache` sets both functions."""
        self.local_bytes: Callable[[], int] = lambda: 0
        """What the cache of this node holds."""
        self._sample: dict[BlockKey, tuple[float, int, float]] = {}
        """By block: its hash, its length, and when it was last asked for."""
        self._below = 1.0
        """The sample has the blocks whose hash is less."""

    def note(self, block: BlockKey, hash_share: float, length: int, now_s: float) -> None:
        """Note that a reader needs a block that the cache of this node does not have."""
        if hash_share < self._below:
            self._sample[block] = (hash_share, length, now_s)
            if len(self._sample) > _SAMPLED:
                self._shrink(now_s)

    async def compute(self) -> None:
        """Compute the share anew."""
        data_bytes = await self._data_bytes() if self.limit_bytes else 0.0
        self.share = min(1.0, self.limit_bytes / data_bytes) if data_bytes else 1.0

    async def _data_bytes(self) -> float:
        """Return the estimated size of the data that this node uses."""
        below, remote_bytes = self._below, 0
        for number, (block, row) in enumerate(list(self._sample.items())):
            if number % _PER_TURN == _PER_TURN - 1:
                await trio.lowlevel.checkpoint()
            if not self.is_local(block):
                remote_bytes += row[1]
        return remote_bytes / below + self.local_bytes()

    def _shrink(self, now_s: float) -> None:
        """Forget old blocks, and then the highest hashes if that is not enough."""
        oldest = now_s - _REMEMBERED_S
        self._sample = {b: row for b, row in self._sample.items() if row[2] >= oldest}
        if len(self._sample) <= _SAMPLED * 3 // 4:
            if not self._sample:
                self._below = 1.0
            return
        hashes = heapq.nsmallest(_SAMPLED * 3 // 4, (row[0] for row in self._sample.values()))
        self._below = max(hashes[-1], math.ulp(1.0))
        self._sample = {b: row for b, row in self._sample.items() if row[0] < self._below}
