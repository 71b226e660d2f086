"""Blocks that were fetched ahead of their reader and that no tier stored.

A full cache may refuse a prefetched block, because the policy keeps the blocks that it has. Such a
block stays in memory here until its reader needs it. Otherwise each would be fetched twice.
"""

from collections import OrderedDict

from cachefs.types import BlockKey

_MOST_BYTES = 32 << 20


class UnstoredAhead:
    """At most `_MOST_BYTES` of blocks; the oldest are dropped first. The `BlockCache` owns it.
    Only the event loop's thread may use it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockKey, memoryview] = OrderedDict()
        self._held_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def get(self, key: BlockKey) -> memoryview | None:
        """Return the whole block, or None. The block stays here, because the kernel reads a file
        in several requests."""
        return self._blocks.get(key)

    def drop(self, object_id: bytes) -> None:
        """Drop all blocks of an object version."""
        for key in [key for key in self._blocks if key.object_id == object_id]:
            self._held_bytes -= self._blocks.pop(key).nbytes

    def put(self, key: BlockKey, data: memoryview) -> None:
        """Store a block. The caller must not change the bytes afterwards."""
        if key in self._blocks:
            return
        self._blocks[key] = data
        self._held_bytes += data.nbytes
        while self._held_bytes > _MOST_BYTES:
            self._held_bytes -= self._blocks.popitem(last=False)[1].nbytes
