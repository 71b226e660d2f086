"""How many requests of jobs may be under way, so that readers don't wait for them.

A reader who waits for the origin has before him whatever is under way already: at full speed that
is some ten times what his own request takes. So it is not enough to give way when he comes; while
readers come at all, jobs keep few requests under way: 2 to an origin near by, up to 16 to one that
takes its time. A reader of a far origin waits for the line, not for the requests of others: beside
such a reader a job keeps 24 requests under way, also while that reader waits.
"""

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.origin.resilience import ResilientOrigin

_WHILE_READERS_WAIT = 2
_MOST_NEAR_READERS = 16
_FAR_S = 0.012
"""An origin that takes longer for a small read is far."""
_BESIDE_FAR_READERS = 24
_NEAR_S = 1.0
_REQUEST_CPU_S = 0.002
"""What a small request costs of this machine's time, roughly; origins near by are on it, too."""
_LOOK_S = 0.002


class Courtesy:
    """Of one kind of request of one job: `begin` and `end` around each. `most_held_bytes` is of the
    cache's memory for blocks on their way."""

    def __init__(self, cache: BlockCache, origin: ResilientOrigin, most_held_bytes: int) -> None:
        self._cache = cache
        self._origin = origin
        self._most_held_bytes = most_held_bytes
        self._turn = trio.Lock()
        self._under_way = 0
        self._under_way_bytes = 0

    async def begin(self, size_bytes: int = 0, requests: int = 1) -> None:
        """Wait until more requests, for so many bytes, are no burden; then count them."""
        if self._turn.locked() or self._must_wait():
            async with self._turn:  # one looks, the others wait for him
                while self._must_wait():  # noqa: ASYNC110 - for things that have no event
                    await trio.sleep(_LOOK_S)
        self._under_way += requests
        self._under_way_bytes += size_bytes

    def end(self, size_bytes: int = 0, requests: int = 1) -> None:
        """They have ended."""
        self._under_way -= requests
        self._under_way_bytes -= size_bytes

    @property
    def is_pressed(self) -> bool:
        """Readers are near, or requests wait for others to end."""
        return self._most() < float("inf")

    def _must_wait(self) -> bool:
        if self._under_way == 0:
            return False
        if self._under_way_bytes:
            held_bytes = max(self._cache.held_bytes, self._under_way_bytes)
            if held_bytes >= self._most_held_bytes:
                return True
        return self._under_way >= self._most()

    def _most(self) -> float:
        if self._origin.queued:
            return _WHILE_READERS_WAIT
        if self._cache.waiting_readers:
            return _BESIDE_FAR_READERS if self._is_far else _WHILE_READERS_WAIT
        if trio.current_time() - self._cache.reader_waited_at < _NEAR_S:
            return self._most_near_readers()
        return float("inf")

    def _most_near_readers(self) -> int:
        """So many that about one of them at a time is being worked on, while the others are on
        their way to an origin that is far and back."""
        if self._is_far:
            return _BESIDE_FAR_READERS
        away_s = self._origin.unhindered_s or 0.0
        requests = int(away_s / _REQUEST_CPU_S)
        return min(max(requests, _WHILE_READERS_WAIT), _MOST_NEAR_READERS)

    @property
    def _is_far(self) -> bool:
        return (self._origin.unhindered_s or 0.0) >= _FAR_S
