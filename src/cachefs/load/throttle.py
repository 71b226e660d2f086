"""Throttle the requests of load jobs, so that readers do not wait for them.

A read from the origin waits for the requests that are already under way. At full speed of a job
that takes about ten times as long as the read itself. So it is not enough to throttle a job when a
read begins. As long as there were reads from the origin in the last second, a job has few requests
under way: 2 to a fast origin nearby, up to 16 to one that takes longer. A read that is bound by the
network (`origin/distance.py`) does not wait for other requests. Beside such a reader a job has 24
requests under way, also while that reader waits.
"""

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.origin.distance import is_network_bound
from cachefs.origin.resilience import ResilientOrigin

_WHILE_READERS_WAIT = 2
_MOST_NEAR_READERS = 16
_BESIDE_NETWORK_BOUND_READERS = 24
_NEAR_S = 1.0
_REQUEST_CPU_S = 0.002
"""Rough CPU time of a small request on this machine, where a nearby origin may run too."""
_LOOK_S = 0.002


class LoadThrottle:
    """The throttle for one kind of request of one job. Call `begin` before and `end` after each.

    `most_held_bytes` is the limit for the cache's memory of blocks in flight, at which jobs wait.
    """

    def __init__(self, cache: BlockCache, origin: ResilientOrigin, most_held_bytes: int) -> None:
        self._cache = cache
        self._origin = origin
        self._most_held_bytes = most_held_bytes
        self._turn = trio.Lock()
        self._under_way = 0
        self._under_way_bytes = 0

    async def begin(self, size_bytes: int = 0, requests: int = 1) -> None:
        """Wait until the throttle allows more requests, then count these `requests`, of
        `size_bytes` in total, as under way."""
        if self._turn.locked() or self._must_wait():
            async with self._turn:  # one task polls, the others wait for the lock
                while self._must_wait():  # noqa: ASYNC110 - these have no event
                    await trio.sleep(_LOOK_S)
        self._under_way += requests
        self._under_way_bytes += size_bytes

    def end(self, size_bytes: int = 0, requests: int = 1) -> None:
        """Count requests as ended; pass the same arguments as to `begin`."""
        self._under_way -= requests
        self._under_way_bytes -= size_bytes

    @property
    def is_limiting(self) -> bool:
        """Whether there is a limit now: a reader waits for the origin or did within the last
        second, or requests are queued."""
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
            return _BESIDE_NETWORK_BOUND_READERS if self._is_network_bound else _WHILE_READERS_WAIT
        if trio.current_time() - self._cache.reader_waited_at < _NEAR_S:
            return self._most_near_readers()
        return float("inf")

    def _most_near_readers(self) -> int:
        """Return the limit while reads from the origin are frequent: so many requests that about
        one at a time uses CPU while the others travel to the origin and back."""
        if self._is_network_bound:
            return _BESIDE_NETWORK_BOUND_READERS
        away_s = self._origin.unhindered_s or 0.0
        requests = int(away_s / _REQUEST_CPU_S)
        return min(max(requests, _WHILE_READERS_WAIT), _MOST_NEAR_READERS)

    @property
    def _is_network_bound(self) -> bool:
        return is_network_bound(self._origin.unhindered_s)
