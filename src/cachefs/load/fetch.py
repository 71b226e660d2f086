"""Fetch the missing files of a job, with many requests at a time, without slowing down readers.

Jobs and readers share in-flight fetches, so no block is fetched twice. While the job is
not throttled, one call fetches several small files: a hop to a thread and back for each file would
cost about as much as the file itself.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError, ObjectChangedError, OriginUnavailableError
from cachefs.load.spec import FAR_JOBS, NEAR_JOBS, Progress
from cachefs.load.throttle import LoadThrottle
from cachefs.load.walk import Failure
from cachefs.origin.resilience import ResilientOrigin
from cachefs.types import ObjectRef, Priority

_EXTENT_BLOCKS = 8
_SMALL_BYTES = 256 << 10
_TOGETHER = 32
"""Files per call. The more files, the smaller the share of a job's other work: the speed is .70x
of obstore's with 8, .77x with 16, .79x with 24, .83x with 32."""
_TOGETHER_BYTES = 4 << 20
"""Bytes per call. A late call is given up as a whole. This amount arrives in time over a slow
connection too."""
_AT_A_TIME = 8
"""Concurrent requests of one call, so that some are under way while it processes responses."""
_WAIT_S = 1.0
_TRIES = 3
_PINNED_AT_A_TIME = 4096
"""Extents whose blocks are pinned on arrival. More than ever wait for storage at a time."""


class FileQueue:
    """File versions in the order in which a job fetches them: those found while it still looks for
    others, then the rest. `Job` fills it, `Fetcher` empties it."""

    def __init__(self) -> None:
        self._first: deque[ObjectRef] = deque()
        self._rest: Iterator[ObjectRef] | None = None
        self._has_ended = False
        self._waiting = trio.lowlevel.ParkingLot()
        """Tasks that found no file. A new file wakes one of them, which takes several and then
        wakes the next if files are left. To wake all for a few files would cost more."""

    def put(self, ref: ObjectRef) -> None:
        """Add a file. Call this only before `end`."""
        self._first.append(ref)
        if len(self._first) == 1:
            self._waiting.unpark()

    def end(self, rest: Iterator[ObjectRef]) -> None:
        """Add all files of `rest`, which is read as they are taken. No others follow."""
        self._rest = rest
        self._waiting.unpark_all()

    def take(self) -> ObjectRef | None:
        """Return the next file; None if there is none at the moment."""
        if self._first:
            return self._first.popleft()
        ref = None if self._rest is None else next(self._rest, None)
        self._has_ended = ref is None and self._rest is not None
        return ref

    async def has_ended(self) -> bool:
        """Call this after `take` has returned None. Wait until there may be another file and return
        False, or return True if none follows."""
        if not self._has_ended:
            await self._waiting.park()
        return self._has_ended

    def wake_next(self) -> None:
        """Let another task take the files that are left. Call this after `take` has returned
        files, before the next await."""
        if self._first:
            self._waiting.unpark()


class _Extent(NamedTuple):
    """A run of blocks that one GET fetches. `is_last` marks the last extent of a file."""

    ref: ObjectRef
    first_block: int
    block_count: int
    is_last: bool

    @property
    def is_small(self) -> bool:
        """Whether the file may be fetched together with others."""
        return self.ref.meta.size_bytes <= _SMALL_BYTES


class _Extents:
    """The extents of the files in a queue. It is empty for a while whenever the queue is."""

    def __init__(self, files: FileQueue) -> None:
        self._files = files
        self._next: deque[_Extent] = deque()

    def take(self) -> _Extent | None:
        """Return the next extent; None if there is none at the moment."""
        if not self._next:
            ref = self._files.take()
            if ref is None:
                return None
            count = ref.block_count
            for first in range(0, count, _EXTENT_BLOCKS):
                blocks = min(_EXTENT_BLOCKS, count - first)
                self._next.append(_Extent(ref, first, blocks, first + blocks == count))
        return self._next.popleft()


class _RequestLimit:
    """Limits the number of requests at a time. Tasks get their turn in order of arrival."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self._free = requests
        self._turn = trio.Lock()
        self._freed = trio.Event()

    def resize(self, requests: int) -> None:
        """Change the number. Requests that are already under way are not affected."""
        if requests != self.requests:
            self._free += requests - self.requests
            self.requests = requests
            self._wake()

    def _wake(self) -> None:
        self._freed.set()
        self._freed = trio.Event()

    @asynccontextmanager
    async def take(self, requests: int) -> AsyncIterator[None]:
        """Wait until so many more requests may be under way, and count them as such until the
        context ends."""
        async with self._turn:
            while self._free < requests:
                await self._freed.wait()
            self._free -= requests
        try:
            yield
        finally:
            self._free += requests
            self._wake()


class Fetcher:
    """Fetches the files of one run of a job. `most_held_bytes` is the limit for the whole cache's
    memory of blocks in flight, at which it waits."""

    def __init__(
        self,
        cache: BlockCache,
        origin: ResilientOrigin,
        most_held_bytes: int,
        progress: Progress,
        on_failure: Callable[[Failure], None],
        pin: bool = False,
    ) -> None:
        """With `pin`, blocks are pinned from the moment when they are stored."""
        self._cache = cache
        self._pin = pin
        self._pinning: deque[ExitStack] = deque()
        self._origin = origin
        self._throttle = LoadThrottle(cache, origin, most_held_bytes)
        self._progress = progress
        self._on_failure = on_failure
        self.failed: set[bytes] = set()
        """Ids of objects that could not be fetched."""

    async def run(self, files: FileQueue, requests: int | None) -> None:
        """Fetch all files until the queue has ended, with at most `requests` requests at a time;
        None for a number that suits the origin. Calls `on_failure` for each file that cannot be
        fetched."""
        extents = _Extents(files)
        limit = _RequestLimit(requests or NEAR_JOBS)

        async def work() -> None:
            while True:
                taken = self._take(extents, _TOGETHER if limit.requests > 1 else 1)
                if not taken:
                    if await files.has_ended():
                        return
                    continue
                files.wake_next()
                if requests is None:
                    limit.resize(FAR_JOBS if self._cache.origin_is_far else NEAR_JOBS)
                for extent in await self._fetch_together(taken, limit):
                    async with limit.take(1):
                        await self._fetch(extent)

        try:
            async with trio.open_nursery() as nursery:
                for _ in range(requests or FAR_JOBS):
                    nursery.start_soon(work)
            if self._pin:
                await self._cache.drain()
        finally:
            self._keep_latest(0)

    def _note_pinned(self, ref: ObjectRef) -> None:
        """Pin blocks of this file on arrival, until `_PINNED_AT_A_TIME` more extents have begun."""
        pinning = ExitStack()
        pinning.enter_context(self._cache.admission_filter.pinning((ref,)))
        self._pinning.append(pinning)
        self._keep_latest(_PINNED_AT_A_TIME)

    def _keep_latest(self, count: int) -> None:
        while len(self._pinning) > count:
            self._pinning.popleft().close()

    def _take(self, extents: _Extents, most: int) -> list[_Extent]:
        """Return the next extent, or several small files and perhaps a larger extent after them.
        Empty if there is none at the moment."""
        if not self._origin.reads_many or self._throttle.is_limiting:
            most = 1
        most_bytes = min(_TOGETHER_BYTES, self._origin.best_read_bytes)
        taken: list[_Extent] = []
        size_bytes = 0
        while (extent := extents.take()) is not None:
            if self._pin:
                self._note_pinned(extent.ref)
            taken.append(extent)
            size_bytes += extent.ref.meta.size_bytes
            if not extent.is_small or len(taken) >= most or size_bytes >= most_bytes:
                break
        return taken

    async def _fetch_together(self, extents: list[_Extent], limit: _RequestLimit) -> list[_Extent]:
        """Fetch the small files of `extents` with one call, if there are several. Return the
        extents that must be fetched one by one."""
        small = {extent.ref.object_id: extent.ref for extent in extents if extent.is_small}
        if len(small) < 2:
            return extents
        size_bytes = sum(ref.meta.size_bytes for ref in small.values())
        at_a_time = min(len(small), limit.requests, _AT_A_TIME)
        async with limit.take(at_a_time):
            await self._throttle.begin(size_bytes, at_a_time)
            try:
                if self._throttle.is_limiting:
                    return extents
                left = await self._cache.fetch_together(list(small.values()), at_a_time)
            except CachefsError:
                return extents
            finally:
                self._throttle.end(size_bytes, at_a_time)
        for ref in left:
            del small[ref.object_id]
        for extent in extents:
            if extent.ref.object_id in small:
                self._progress.fetched_bytes += extent.ref.meta.size_bytes
                self._progress.fetched_files += 1
        return [extent for extent in extents if extent.ref.object_id not in small]

    async def _fetch(self, extent: _Extent) -> None:
        ref = extent.ref
        if ref.object_id in self.failed:
            return
        blocks = range(extent.first_block, extent.first_block + extent.block_count)
        size_bytes = sum(map(ref.block_length, blocks))
        if extent.first_block == 0 and self._cache.object_slabs.wants(ref):
            await self._cache.object_slabs.keep(ref, may_evict=True)
        tries = 0
        while True:
            await self._throttle.begin(size_bytes)
            try:
                self._cache.fetch(
                    ref, extent.first_block, extent.block_count, priority=Priority.LOAD
                )
                await self._cache.fetched(ref, extent.first_block, extent.block_count)
                break
            except OriginUnavailableError as error:
                tries += 1
                if not self._origin.is_down and tries >= _TRIES:
                    self._fail(ref, error)
                    return
                self._progress.waiting_for = str(error)
                await trio.sleep(_WAIT_S)
                self._progress.waiting_for = None
            except CachefsError as error:
                self._fail(ref, error)
                return
            finally:
                self._throttle.end(size_bytes)
        self._progress.fetched_bytes += size_bytes
        self._progress.fetched_files += extent.is_last

    def _fail(self, ref: ObjectRef, error: CachefsError) -> None:
        self.failed.add(ref.object_id)
        self._progress.failed_files += 1
        changed = isinstance(error, ObjectChangedError)
        why = "it was replaced while it was being loaded" if changed else str(error)
        self._on_failure(Failure(ref.path, why))
