"""In-flight fetches from the origin, and the bound on their memory."""

import math
from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

import trio

from cachefs.errors import BadDataError, CachefsError, OriginError, OriginUnavailableError
from cachefs.types import BLOCK_BYTES, READER_TURN, BlockKey, ObjectRef, Priority, Turn

_SLOWLY_S = 0.5


class InFlightFetch:
    """One GET of a contiguous run of blocks, or of a fragment of one block; `Fetches` owns it.

    It is over when `done` is set; then either `data` or `error` is set.
    """

    __slots__ = (
        "began_at",
        "block_count",
        "data",
        "done",
        "ended_at",
        "error",
        "first_block",
        "has_room",
        "into_free_space",
        "is_ahead",
        "is_fragment",
        "is_joined",
        "keys",
        "length",
        "offset",
        "open_blocks",
        "ref",
        "told",
        "turn",
    )

    def __init__(
        self, ref: ObjectRef, first_block: int, block_count: int, turn: Turn = READER_TURN
    ) -> None:
        self.ref = ref
        self.first_block = first_block
        self.block_count = block_count
        object_id, end = ref.object_id, first_block + block_count
        self.keys = [BlockKey(object_id, index) for index in range(first_block, end)]
        self.offset = first_block * BLOCK_BYTES
        self.length = (end - 1) * BLOCK_BYTES + ref.block_length(end - 1) - self.offset
        self.began_at = trio.current_time()
        self.ended_at = math.inf
        self.done = trio.Event()
        self.has_room = False
        """False while it waits for memory (`FetchMemory`)."""
        self.is_ahead = False
        """The blocks are fetched ahead of an expected reader."""
        self.into_free_space = False
        """No reader may ever need the blocks. A tier may evict no other block for them."""
        self.is_fragment = False
        """It brings only a part of its one block, for one reader."""
        self.is_joined = False
        """A reader waits for it, or has waited."""
        self.turn = turn
        self.told: list[Callable[[bool], None]] = []
        """See `Fetches.tell`."""
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.open_blocks = block_count
        """Number of blocks that are neither stored nor given up."""

    @property
    def failed_slowly(self) -> bool:
        """Whether it failed after more than `_SLOWLY_S`, because the origin was unavailable or sent
        bad data."""
        slowly = self.ended_at - self.began_at > _SLOWLY_S
        return slowly and isinstance(self.error, OriginUnavailableError | BadDataError)

    def block(self, block_index: int) -> memoryview:
        """Return the bytes of one block, not copied.

        If the fetch failed, raises a new instance of its error.
        """
        return self.part(block_index, 0, self.ref.block_length(block_index))

    def part(self, block_index: int, offset: int, length: int) -> memoryview:
        """Return `length` bytes at `offset` of one block, as `block` does."""
        if self.data is None:
            raise _afresh(self.error)
        start = block_index * BLOCK_BYTES + offset - self.offset
        return self.data[start : start + length]


def _afresh(error: BaseException | None) -> CachefsError:
    """Return a new exception for each waiter: one instance raised in several tasks would collect
    all their tracebacks."""
    if isinstance(error, OriginError):
        return type(error)(*error.args)
    if error is None or isinstance(error, trio.Cancelled):
        return OriginUnavailableError("the cache is shutting down")
    return OriginUnavailableError(f"reading from the origin failed: {error!r}")


class _Asked(NamedTuple):
    turn: Turn
    size_bytes: int
    granted: trio.Event


def _priority(asked: _Asked) -> Priority:
    return asked.turn.priority


class FetchMemory:
    """Bounds the bytes that are held at a time. Requests are served in order of priority, and of
    arrival among equals.

    The last quarter is for readers. Otherwise requests that wait for the bandwidth limit, behind
    readers, could hold all the memory that these readers need. A request for more than there is
    for it waits until all others have released their bytes, and counts as the total at most.
    `release` applies the same limit.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.finished_at = -math.inf
        """When a block was last stored or given up, on trio's clock."""
        self._free_bytes = total_bytes
        self._waiting: list[_Asked] = []

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self._free_bytes

    def try_reserve(self, size_bytes: int, turn: Turn = READER_TURN) -> bool:
        """Reserve the bytes if they are free and no request of at least this priority waits.
        Returns whether it did."""
        waiting = self._waiting
        if waiting and waiting[0].turn.priority <= turn.priority:
            return False
        if not self._fits(size_bytes, turn):
            return False
        self._free_bytes -= size_bytes
        return True

    def _fits(self, size_bytes: int, turn: Turn) -> bool:
        kept_bytes = 0 if turn.priority is Priority.READER else self.total_bytes // 4
        if self._free_bytes == self.total_bytes:
            kept_bytes = 0
        return size_bytes <= self._free_bytes - kept_bytes

    async def reserve(self, size_bytes: int, turn: Turn = READER_TURN) -> None:
        """Wait until the bytes can be held. A cancelled wait reserves nothing."""
        size_bytes = min(size_bytes, self.total_bytes)
        if self.try_reserve(size_bytes, turn):
            return
        granted = trio.Event()
        entry = _Asked(turn, size_bytes, granted)
        insort(self._waiting, entry, key=_priority)
        try:
            await granted.wait()
        except trio.Cancelled:
            if granted.is_set():
                self.release(size_bytes)
            else:
                self._waiting.remove(entry)
                self._grant()
            raise

    def release(self, size_bytes: int) -> None:
        """Return reserved bytes and grant waiting requests in order."""
        self._free_bytes += min(size_bytes, self.total_bytes)
        self._grant()

    def finish_block(self, fetch: InFlightFetch) -> None:
        """Record that one block of the fetch is stored or given up. After its last block, release
        the bytes of the whole fetch."""
        self.finished_at = trio.current_time()
        fetch.open_blocks -= 1
        if fetch.open_blocks == 0:
            self.release(fetch.length)

    def reorder(self) -> None:
        """Note that the priority of turns has risen."""
        self._waiting.sort(key=_priority)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0].size_bytes, self._waiting[0].turn):
            asked = self._waiting.pop(0)
            self._free_bytes -= asked.size_bytes
            asked.granted.set()
