"""Blocks that were fetched ahead of their reader and that no tier took.

A full cache may refuse a block that nobody has asked for yet (the policy keeps what it has). Such a
block stays in memory until its reader comes; without this, each would be fetched twice.
"""

from collections import OrderedDict

from cachefs.types import BlockKey

_MOST_BYTES = 32 << 20


class UnstoredAhead:
    """At most `_MOST_BYTES` of blocks; the oldest go first. Only of the loop thread."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockKey, memoryview] = OrderedDict()
        self._held_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def get(self, key: BlockKey) -> memoryview | None:
        """The whole block. It stays, because the kernel reads a file in several requests."""
        return self._blocks.get(key)

    def put(self, key: BlockKey, data: memoryview) -> None:
        """Keep a block. The bytes must not change any more."""
        if key in self._blocks:
            return
        self._blocks[key] = data
        self._held_bytes += data.nbytes
        while self._held_bytes > _MOST_BYTES:
            self._held_bytes -= self._blocks.popitem(last=False)[1].nbytes
