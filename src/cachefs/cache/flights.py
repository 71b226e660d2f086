"""Blocks on their way from the origin: one flight per block, and a bound on their memory."""

import math
from collections import deque

import trio

from cachefs.errors import BadDataError, CachefsError, OriginError, OriginUnavailableError
from cachefs.types import BLOCK_BYTES, BlockKey, ObjectRef

_SLOWLY_S = 0.5


class Flight:
    """One GET of a contiguous run of blocks. Over when `done` is set: `data` or `error` then."""

    __slots__ = (
        "_open_blocks",
        "began_at",
        "block_count",
        "data",
        "done",
        "ended_at",
        "error",
        "first_block",
        "has_room",
        "is_ahead",
        "is_joined",
        "keys",
        "length",
        "offset",
        "ref",
    )

    def __init__(self, ref: ObjectRef, first_block: int, block_count: int) -> None:
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
        """False while it waits for memory (`Budget`)."""
        self.is_ahead = False
        """Nobody has asked for its blocks yet, but a reader is expected."""
        self.is_joined = False
        """Somebody waits for it, or has."""
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self._open_blocks = block_count

    @property
    def failed_slowly(self) -> bool:
        """It is over, and whoever waited for it in vain did so for a while."""
        slowly = self.ended_at - self.began_at > _SLOWLY_S
        return slowly and isinstance(self.error, OriginUnavailableError | BadDataError)

    def block(self, block_index: int) -> memoryview:
        """The bytes of one block, not copied. Raises what the GET raised, afresh."""
        if self.data is None:
            raise _afresh(self.error)
        start = (block_index - self.first_block) * BLOCK_BYTES
        return self.data[start : start + self.ref.block_length(block_index)]

    def settle_block(self) -> bool:
        """One block is stored or given up. True for the last: nothing of the flight is needed
        any more."""
        self._open_blocks -= 1
        return self._open_blocks == 0


def _afresh(error: BaseException | None) -> CachefsError:
    """An exception of its own for every waiter: one instance raised in several tasks would
    gather all their tracebacks."""
    if isinstance(error, OriginError):
        return type(error)(*error.args)
    if error is None or isinstance(error, trio.Cancelled):
        return OriginUnavailableError("the cache is shutting down")
    return OriginUnavailableError(f"reading from the origin failed: {error!r}")


class Budget:
    """Bytes that may be held at once. First come, first served; a request for more than the
    whole counts as the whole, so that it waits for everybody else and then goes on."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._waiting: deque[tuple[int, trio.Event]] = deque()

    @property
    def used_bytes(self) -> int:
        return self._total_bytes - self._free_bytes

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve if nobody waits and the bytes can be held now."""
        if self._waiting or size_bytes > self._free_bytes:
            return False
        self._free_bytes -= size_bytes
        return True

    async def reserve(self, size_bytes: int) -> None:
        """Wait until the bytes can be held. A cancelled wait reserves nothing."""
        size_bytes = min(size_bytes, self._total_bytes)
        if self.try_reserve(size_bytes):
            return
        granted = trio.Event()
        entry = (size_bytes, granted)
        self._waiting.append(entry)
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
        self._free_bytes += min(size_bytes, self._total_bytes)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            size_bytes, granted = self._waiting.popleft()
            self._free_bytes -= size_bytes
            granted.set()
