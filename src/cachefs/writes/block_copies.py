"""Lets the cached blocks of renamed files stay cached: copies them to the file's new object id.

The id of a block contains the path of its object. So a rename makes a copy of each cached block,
from tier to tier, in the background. A reader that comes first fetches the block from the origin.
"""

from collections import deque

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.types import ObjectRef

_MOST_WAITING = 100_000
"""The most files whose blocks wait to be copied; those of others are fetched anew."""


class BlockCopies:
    """The copies of one mount. `run` makes them for as long as the mount."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._waiting: deque[tuple[ObjectRef, ObjectRef]] = deque(maxlen=_MOST_WAITING)
        self._added = trio.Event()

    def add(self, before: ObjectRef, after: ObjectRef) -> None:
        """Copy the cached blocks of `before` in the background, as those of `after`, which has the
        same bytes."""
        if before.object_id != after.object_id:
            self._waiting.append((before, after))
            self._added.set()

    async def make_room(self, after: ObjectRef) -> None:
        """Drop what is cached of a version before a file gets it, as these may be other bytes (see
        `WritableOrigin.repeats_versions`)."""
        await self._cache.drop_version(after)

    async def run(self) -> None:
        """Make the copies. Never returns."""
        while True:
            await self._added.wait()
            self._added = trio.Event()
            while self._waiting:
                await self._cache.copy_blocks(*self._waiting.popleft())
