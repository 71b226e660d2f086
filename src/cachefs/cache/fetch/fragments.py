"""Answers a random read of a large file from a small GET of its own; the block follows.

A random reader of a few KiB would otherwise wait until the whole block (1 MiB) has arrived. A
fragment is the range that the reader needs, from one GET of the pinned version. It is never stored:
the block is fetched beside it as usual, and only whole blocks enter a tier.

**Blocks that follow.** They wait in a queue, and only a few of them are fetched at a time, because
the fragments of readers come first. A near origin shares the processor with the readers, so there
the blocks wait until the readers pause or the queue is half full. When it is full, random readers
wait for whole blocks until it is nearly empty.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import trio

from cachefs.cache.fetch.fetches import Fetches
from cachefs.cache.fetch.in_flight import InFlightFetch
from cachefs.types import BlockKey, ObjectRef, Priority, Turn

_LEAST_FILE_BYTES = 128 << 20
"""In smaller files random readers soon have all blocks, and the extra GETs made them slower."""
_MOST_BYTES = 256 << 10
_MOST_QUEUED = 256
_MANY_QUEUED = 128
_FEW_QUEUED = 16
_AT_A_TIME = 1
_AT_A_TIME_FAR = 8
_PAUSE_S = 0.004
"""Readers that take no fragment for so long have paused."""


class _Queued(NamedTuple):
    ref: ObjectRef
    queued_at: float


class Fragments:
    """The fragments of one mount and the blocks that follow them; the `BlockCache` owns it. Only
    the event loop's thread may use it."""

    def __init__(self, fetches: Fetches, is_unneeded: Callable[[BlockKey, float], bool]) -> None:
        """`is_unneeded(key, queued_at)`: the block is cached or in flight, or its object was
        evicted after `queued_at`."""
        self.queued: OrderedDict[BlockKey, _Queued] = OrderedDict()
        """The blocks that follow and whose fetches have not begun. Only this object changes it."""
        self._fetches = fetches
        self._is_unneeded = is_unneeded
        self._latest: InFlightFetch | None = None
        """The fragment that was started last."""
        self._is_full = False
        self._followers = 0

    def start(
        self, ref: ObjectRef, key: BlockKey, offset: int, length: int
    ) -> InFlightFetch | None:
        """Start the fetch of `length` bytes at `offset` of the block, and let the block follow.

        Returns None if the reader must wait for the whole block. There must be no await between the
        caller's check that the block has no fetch and this call. Raises `OriginUnavailableError` at
        shutdown.
        """
        if ref.meta.size_bytes < _LEAST_FILE_BYTES or length > _MOST_BYTES:
            return None
        if self._is_full and len(self.queued) <= _FEW_QUEUED:
            self._is_full = False
        # A second reader of a queued block waits for the block, whose fetch begins at once.
        if self._is_full or key in self.queued or self._fetches.is_held_back:
            return None
        fragment = self._fetches.start_fragment(ref, key.block_index, offset, length)
        if fragment is not None:
            self._latest = fragment
            self.queued[key] = _Queued(ref, trio.current_time())
            self._is_full = len(self.queued) >= _MOST_QUEUED
            self._start_follower()
        return fragment

    def _start_follower(self) -> None:
        most = _AT_A_TIME_FAR if self._fetches.is_far else _AT_A_TIME
        nursery = self._fetches.nursery
        if self._followers < most and nursery is not None:
            self._followers += 1
            nursery.start_soon(self._follow)

    async def _follow(self) -> None:
        """Fetch the queued blocks one after another until none is left."""
        try:
            while self.queued:
                if self._must_wait():
                    await trio.sleep(_PAUSE_S)
                    continue
                key, queued = self.queued.popitem(last=False)
                if self._is_unneeded(key, queued.queued_at):
                    continue
                fetch = self._fetches.start(
                    queued.ref, key.block_index, 1, Turn(Priority.READ_AHEAD)
                )
                await fetch.done.wait()
                if fetch.error is not None:
                    self._drop(key.object_id)
        finally:
            self._followers -= 1

    def _must_wait(self) -> bool:
        """Whether readers of a near origin take one fragment after the other, and the queue has
        room for more blocks."""
        latest = self._latest
        if latest is None or self._is_full or len(self.queued) >= _MANY_QUEUED:
            return False
        is_quiet = latest.done.is_set() and trio.current_time() > latest.ended_at + _PAUSE_S
        return not (is_quiet or self._fetches.is_far)

    def _drop(self, object_id: bytes) -> None:
        """Let no more blocks of this object follow, because the fetch of one has failed."""
        for key in [key for key in self.queued if key.object_id == object_id]:
            del self.queued[key]
