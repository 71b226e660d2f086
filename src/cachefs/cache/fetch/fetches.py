"""Fetches blocks from the shared tier or the origin: each block has at most one in-flight fetch.

All readers of a block wait for the same fetch. Fetches run in the cache's own nursery: a reader
that stops waiting ends only its own wait.

**Small files together.** `together` fetches many small files in one call of the origin. Each file
is a fetch, which readers may join. `together` returns the files that the call did not bring, and
the caller fetches them one by one. If a reader has joined such a file, it is instead fetched alone
at once.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import trio

from cachefs.cache.counters import CacheCounters
from cachefs.cache.fetch.in_flight import FetchMemory, InFlightFetch
from cachefs.cache.policies import History
from cachefs.errors import BadDataError, OriginError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.origin.distance import is_far
from cachefs.shared.tier import SharedTier
from cachefs.types import BLOCK_BYTES, READER_TURN, BlockKey, ObjectRef, Priority, Reply, Turn

log = logging.getLogger(__name__)

_FAILURE_S = 1.0
"""How long a block is not fetched again after its fetch failed slowly
(`InFlightFetch.failed_slowly`)."""
_FAILURES = 4096
_HELD_BACK_S = 1.0


class Fetches:
    """All in-flight fetches of one cache, which owns this object.

    Calls `admit` with each fetch that has its bytes. The receiver must report each block of it to
    `FetchMemory.finish_block` when the block is stored or given up.
    """

    def __init__(
        self,
        origin: Origin,
        history: History,
        counters: CacheCounters,
        memory: FetchMemory,
        patience_s: float,
        admit: Callable[[InFlightFetch], None],
        shared: SharedTier,
    ) -> None:
        self.in_flight: dict[BlockKey, InFlightFetch] = {}
        self.nursery: trio.Nursery | None = None
        """Where fetches run. The `BlockCache` sets it while it runs."""
        self._origin = origin
        self._history = history
        self._counters = counters
        self._memory = memory
        self._patience_s = patience_s
        self._admit = admit
        self._shared = shared
        self._failed: dict[BlockKey, InFlightFetch] = {}
        self._landed_at = -math.inf

    @property
    def best_read_bytes(self) -> float:
        """See `Origin.best_read_bytes`; less if there is little memory, so that it has room beside
        what readers need."""
        return min(self._origin.best_read_bytes, self._memory.total_bytes // 4)

    @property
    def is_far(self) -> bool:
        """Whether each request to the origin takes long, however small: see `distance.is_far`."""
        return is_far(self._origin.quickest_s)

    @property
    def is_held_back(self) -> bool:
        """Whether a read has waited for the bandwidth limit within the last `_HELD_BACK_S`."""
        return trio.current_time() < self._origin.held_back_at + _HELD_BACK_S

    # -- waiting -------------------------------------------------------------------------------

    def failed_lately(self, key: BlockKey) -> InFlightFetch | None:
        """Return the block's fetch that failed slowly within the last `_FAILURE_S`, or None.
        When read-ahead fails, the kernel requests the page once more. Its reader has already waited
        for at least half a second, so this second request fails at once.
        """
        failed = self._failed.get(key)
        if failed is None:
            return None
        if trio.current_time() < failed.ended_at + _FAILURE_S:
            return failed
        del self._failed[key]
        return None

    async def wait_for(self, fetch: InFlightFetch) -> None:
        """Wait until the fetch is over, for a reader. The fetch gets a reader's priority.

        Raises `OriginUnavailableError` when nothing has progressed for the patience (`patience_s`).
        A moving queue of requests or of blocks to store counts as progress, and so does a slow
        body.
        """
        fetch.is_joined = True
        if fetch.turn.priority is not Priority.READER:
            fetch.turn.priority = Priority.READER
            self._memory.reorder()
            self._origin.reorder()
        while not fetch.done.is_set():
            origin = self._origin
            moved_at = max(
                fetch.began_at, self._landed_at, origin.held_back_at, origin.progressed_at
            )
            if not fetch.has_room:
                moved_at = max(moved_at, self._memory.finished_at)
            if moved_at + self._patience_s <= trio.current_time():
                raise OriginUnavailableError(
                    f"{fetch.ref.path} can't be read: nothing has come from the origin for "
                    f"{self._patience_s:.1f} s"
                )
            with trio.move_on_at(moved_at + self._patience_s):
                await fetch.done.wait()

    def tell(self, fetch: InFlightFetch, on_over: Callable[[bool], None]) -> None:
        """Do `wait_for` in a task that all callers of a fetch share, and call `on_over` with True
        afterwards; with False if a reader would not wait any longer. Raises
        `OriginUnavailableError` at shutdown."""
        nursery = self._open_nursery()
        fetch.told.append(on_over)
        if len(fetch.told) == 1:
            nursery.start_soon(self._tell, fetch)

    async def _tell(self, fetch: InFlightFetch) -> None:
        is_over = False
        try:
            await self.wait_for(fetch)
            is_over = True
        except OriginUnavailableError:
            pass
        finally:
            told, fetch.told = fetch.told, []
            for on_over in told:
                on_over(is_over)

    async def fetched(self, ref: ObjectRef, block_indexes: range) -> None:
        """Wait for the in-flight fetches of these blocks. Raises `OriginError` if one failed."""
        for index in block_indexes:
            fetch = self.in_flight.get(BlockKey(ref.object_id, index))
            if fetch is not None:
                fetch.is_joined = True
                await fetch.done.wait()
                fetch.block(index)

    # -- one fetch -----------------------------------------------------------------------------

    def start(
        self,
        ref: ObjectRef,
        first_block: int,
        block_count: int,
        turn: Turn = READER_TURN,
        ahead: bool = False,
        into_free_space: bool = False,
    ) -> InFlightFetch:
        """Start the fetch of a run of blocks and return it. `InFlightFetch` describes `ahead`
        (`is_ahead`) and `into_free_space`.

        None of the blocks may be in `in_flight`. There must be no await between the caller's check
        and this call, so that no block has two fetches. Raises `OriginUnavailableError` at
        shutdown.
        """
        nursery = self._open_nursery()
        fetch = InFlightFetch(ref, first_block, block_count, turn)
        fetch.is_ahead = ahead
        fetch.into_free_space = into_free_space
        for key in fetch.keys:
            assert key not in self.in_flight
            self.in_flight[key] = fetch
            self._history.on_miss(key)
        if not self._begin(fetch):
            nursery.start_soon(self._fetch_alone, fetch)
        return fetch

    def reply(self, ref: ObjectRef, reply: Reply, on_replied: Callable[[bool], None]) -> bool:
        """Begin to fetch a small file for a READ of the kernel, which is answered before Python
        knows that the bytes have come. Return whether it has begun; if so, `on_replied` is called
        later with whether the READ was answered. If it was not, the fetch goes on.

        The block is as for `start`."""
        self._open_nursery()
        fetch = InFlightFetch(ref, 0, 1)
        fetch.is_joined = True
        if not self._begin(fetch, reply, on_replied):
            return False
        (key,) = fetch.keys
        self.in_flight[key] = fetch
        self._history.on_miss(key)
        return True

    @property
    def sends(self) -> bool:
        """See `Origin.sends`."""
        return self._origin.sends

    def send(
        self, parts: Sequence[memoryview], reply: Reply, on_replied: Callable[[bool], None]
    ) -> bool:
        """Do `Origin.send` for bytes that this cache has."""
        return self._origin.send(parts, reply, on_replied)

    def _begin(
        self,
        fetch: InFlightFetch,
        reply: Reply | None = None,
        on_replied: Callable[[bool], None] | None = None,
    ) -> bool:
        """Begin to fetch a small file without a task, if nothing must be waited for."""
        ref, length = fetch.ref, fetch.length
        if length != ref.meta.size_bytes or length > BLOCK_BYTES or self._shared.is_on:
            return False
        if not self._memory.try_reserve(length, fetch.turn):
            return False
        take = partial(self._take, fetch, on_replied)
        try:
            fetch.has_room = self._origin.begin_read(ref.path, ref.meta, take, reply)
        except Exception:  # the usual way meets it, too, and tells the reader
            log.exception("unexpected error before %r is fetched", ref.path)
            fetch.has_room = False
        if not fetch.has_room:
            self._memory.release(length)
        return fetch.has_room

    def _take(
        self,
        fetch: InFlightFetch,
        on_replied: Callable[[bool], None] | None,
        data: memoryview | None,
    ) -> None:
        """Take the bytes of a fetch without a task. If there are none, a task fetches them, which
        repeats and explains."""
        if self.nursery is None:  # at shutdown, when no tier takes anything
            self._counters.fetch_errors += data is None
            self._memory.release(fetch.length)
            self._end(fetch)
        elif data is not None:
            self._counters.fetches += 1
            self._counters.fetched_bytes += fetch.length
            self._shared.note_origin(trio.current_time() - fetch.began_at, fetch.length)
            fetch.data = data
            self._end(fetch)
        else:
            fetch.turn = Turn(fetch.turn.priority, fetch.began_at)
            self.nursery.start_soon(self._fetch_alone, fetch)
        if on_replied is not None:
            on_replied(data is not None)

    def start_fragment(
        self, ref: ObjectRef, block_index: int, offset: int, length: int
    ) -> InFlightFetch | None:
        """Start the fetch of `length` bytes at `offset` of a block, and return it. It is not in
        `in_flight`, and its bytes are never admitted, so the block may have a fetch as well.

        Returns None if the memory has no room. Raises `OriginUnavailableError` at shutdown.
        """
        nursery = self._open_nursery()
        if not self._memory.try_reserve(length):
            return None
        fetch = InFlightFetch(ref, block_index, 1)
        fetch.offset += offset
        fetch.length = length
        fetch.is_fragment = fetch.has_room = True
        nursery.start_soon(self._fetch_alone, fetch)
        return fetch

    def put(self, ref: ObjectRef, data: memoryview, block_index: int = 0) -> bool:
        """Take a block whose bytes came without a fetch.

        Returns False if the fetch memory has no room. There must be no await between the caller's
        check of `in_flight` and this call."""
        if not self._memory.try_reserve(data.nbytes):
            return False
        fetch = InFlightFetch(ref, block_index, 1)
        fetch.is_ahead = fetch.has_room = True
        fetch.data = data
        (key,) = fetch.keys
        self.in_flight[key] = fetch
        self._history.on_miss(key)
        self._counters.fetches += 1
        self._counters.fetched_bytes += data.nbytes
        self._end(fetch)
        return True

    def _open_nursery(self) -> trio.Nursery:
        if self.nursery is None:
            raise OriginUnavailableError("the cache is shutting down")
        return self.nursery

    async def _fetch_alone(self, fetch: InFlightFetch) -> None:
        length = fetch.length
        try:
            if not fetch.has_room:
                await self._memory.reserve(length, fetch.turn)
                fetch.has_room = True
            fetch.data = await self._get(fetch, length)
        except BaseException as error:
            fetch.error = error
            self._counters.fetch_errors += 1
            if isinstance(error, Exception) and not isinstance(error, OriginError):
                log.exception("unexpected error while fetching %r", fetch.ref.path)
            if not isinstance(error, Exception):
                raise
        finally:
            # Blocks keep their reservation until `finish_block`. After a failure, and for a
            # fragment, nothing is admitted, so it is released here.
            if fetch.has_room and (fetch.data is None or fetch.is_fragment):
                self._memory.release(length)
            self._end(fetch)

    async def _get(self, fetch: InFlightFetch, length: int) -> memoryview:
        from_origin = partial(self._from_origin, fetch.turn, fetch.ref)
        if fetch.is_fragment or not self._shared.is_on:
            return await from_origin(fetch.offset, length)
        return await self._shared.read(fetch.ref, fetch.first_block, fetch.block_count, from_origin)

    async def _from_origin(
        self, turn: Turn, ref: ObjectRef, offset: int, length: int
    ) -> memoryview:
        self._counters.fetches += 1
        log.debug("%r: %d bytes from %d on are fetched", ref.path, length, offset)
        began_at = trio.current_time()
        read = self._origin.read_in_turn(turn, ref.path, ref.meta, offset, length)
        data = memoryview(await read)
        self._shared.note_origin(trio.current_time() - began_at, length)
        if data.nbytes != length:
            raise BadDataError(f"{ref.path}: got {data.nbytes} bytes instead of {length}")
        self._counters.fetched_bytes += length
        return data.cast("B") if data.format != "B" else data

    def _end(self, fetch: InFlightFetch) -> None:
        """Remove the fetch from `in_flight`, admit its data and wake its readers; no await."""
        if not fetch.is_fragment:
            for key in fetch.keys:
                del self.in_flight[key]
        if fetch.data is not None:
            self._landed_at = trio.current_time()
            if not fetch.is_fragment:
                self._admit(fetch)
        fetch.ended_at = trio.current_time()
        if fetch.failed_slowly:
            if len(self._failed) > _FAILURES:
                self._failed.clear()
            self._failed.update(dict.fromkeys(fetch.keys, fetch))
        fetch.done.set()

    # -- small files together ------------------------------------------------------------------

    async def together(
        self, refs: Sequence[ObjectRef], at_a_time: int, stopped: Callable[[], bool]
    ) -> list[ObjectRef]:
        """Fetch files of one block each for a load, in one call of the origin, until `stopped()`
        is true.

        Returns the files that must be fetched one by one. No file may be in `in_flight`, with no
        await between the caller's check and this call. `at_a_time` files are fetched in parallel.
        """
        if sum(ref.meta.size_bytes for ref in refs) > self._memory.total_bytes:
            return list(refs)
        nursery = self._open_nursery()
        turn = Turn(Priority.LOAD)
        fetches = [InFlightFetch(ref, 0, 1, turn) for ref in refs]
        for fetch in fetches:
            (key,) = fetch.keys
            assert key not in self.in_flight
            self.in_flight[key] = fetch
        nursery.start_soon(self._fetch_together, turn, fetches, at_a_time, stopped)
        for fetch in fetches:
            await fetch.done.wait()
        return [fetch.ref for fetch in fetches if fetch.data is None]

    async def _fetch_together(
        self,
        turn: Turn,
        fetches: list[InFlightFetch],
        at_a_time: int,
        stopped: Callable[[], bool],
    ) -> None:
        size_bytes = sum(fetch.length for fetch in fetches)
        found: list[memoryview | None] = [None] * len(fetches)
        reserved = shut_down = False
        try:
            await self._memory.reserve(size_bytes, turn)
            reserved = True
            for fetch in fetches:
                fetch.has_room = True
            many = partial(self._many_from_origin, turn, at_a_time, stopped)
            refs = [fetch.ref for fetch in fetches]
            found = await (self._shared.read_many(refs, many) if self._shared.is_on else many(refs))
        except OriginError:
            pass  # each file is now fetched alone, which reports the error
        except Exception:
            log.exception("unexpected error while fetching %d files", len(fetches))
        except BaseException:
            shut_down = True
            raise
        finally:
            for fetch, data in zip(fetches, found, strict=True):
                self._end_or_fetch_alone(fetch, data, reserved, shut_down)

    async def _many_from_origin(
        self, turn: Turn, at_a_time: int, stopped: Callable[[], bool], refs: Sequence[ObjectRef]
    ) -> list[memoryview | None]:
        wanted = [(ref.path, ref.meta) for ref in refs]
        found = await self._origin.read_many(wanted, at_a_time, stopped, turn)
        for data in found:
            if data is not None:
                self._counters.fetches += 1
                self._counters.fetched_bytes += data.nbytes
        return found

    def _end_or_fetch_alone(
        self, fetch: InFlightFetch, data: memoryview | None, reserved: bool, shut_down: bool
    ) -> None:
        (key,) = fetch.keys
        if data is not None and data.nbytes == fetch.length:
            self._history.on_miss(key)
            fetch.data = data
        elif reserved:
            self._memory.release(fetch.length)
            fetch.has_room = False
        if fetch.data is None and fetch.is_joined and not shut_down and self.nursery:
            self._history.on_miss(key)
            self.nursery.start_soon(self._fetch_alone, fetch)
        else:
            self._end(fetch)
