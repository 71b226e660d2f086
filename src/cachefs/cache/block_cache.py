"""Blocks for readers: from memory, from a tier, or from the origin, fetched once.

The way of a read: `read_now` (on the loop, no waiting) and, if that says None, `read` (a worker
thread, or a flight). A block passes through `_flights` -> `_admitting` -> a tier's index, and is
found in exactly one of them at every moment: each step from one to the next is atomic on the
loop. (A block that is not kept leaves after the second.)

Flights belong to the cache's own nursery. A reader that gives up ends its own wait, nothing else.
"""

import logging
from collections.abc import Sequence

import trio

from cachefs.cache.admission import Admission, Candidate
from cachefs.cache.counters import CacheCounters, TierStatus
from cachefs.cache.evictor import Evictor
from cachefs.cache.flights import Budget, Flight
from cachefs.cache.placement import Placement
from cachefs.cache.recovery import adopt_orphans
from cachefs.cache.store import TierStore
from cachefs.errors import BadDataError, OriginError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.tiers.tier import Tier
from cachefs.types import BLOCK_BYTES, BlockKey, Buffer, ObjectRef
from cachefs.workers import Workers

log = logging.getLogger(__name__)

DEFAULT_BUFFER_BYTES = 300 << 20
_READER_THREADS = 4
_COMMIT_INTERVAL_S = 1.0
_DRAIN_S = 10.0


class BlockCache:
    """One per mount. Usable while `run` runs; `aclose` ends it and releases the tiers."""

    def __init__(
        self,
        origin: Origin,
        tiers: Sequence[Tier],
        policy_name: str = "lru",
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> None:
        """Opens the tiers' indexes. Raises `CacheDirError`; the tiers are the caller's then."""
        self.counters = CacheCounters()
        self._origin = origin
        self._stores: list[TierStore] = []
        try:
            for tier in tiers:
                self._stores.append(TierStore.open(tier, policy_name))
        except BaseException:
            for store in self._stores:
                store.index.abandon()
            raise
        self._placement = Placement(
            [tier.identity.uuid for tier in tiers], [tier.quota_bytes for tier in tiers]
        )
        self._evictors = [Evictor(store) for store in self._stores]
        self._admissions = [
            Admission(store, evictor, self._settle)
            for store, evictor in zip(self._stores, self._evictors, strict=True)
        ]
        self._only_store = self._stores[0] if len(self._stores) == 1 else None
        self._flights: dict[BlockKey, Flight] = {}
        self._admitting: dict[BlockKey, memoryview] = {}
        self._budget = Budget(buffer_bytes)
        self._scratch = memoryview(bytearray(BLOCK_BYTES))
        self._workers: list[Workers] = []
        self._nursery: trio.Nursery | None = None
        self._stopped: trio.Event | None = None

    # -- readers -------------------------------------------------------------------------------

    def read_now(
        self, key: BlockKey, offset: int, length: int, into: memoryview | None = None
    ) -> memoryview | None:
        """`length` >= 1 bytes at `offset` of a block, if they can be had without waiting.

        None says nothing but "ask `read`". Without `into` the answer may lie in memory that the
        next call overwrites: use it before the next await. With `into` (at least `length` long)
        it is the filled part of `into`. The range must lie inside the block.
        """
        fetched = self._admitting.get(key)
        if fetched is not None:
            found: memoryview | None = fetched[offset : offset + length]
            if into is not None and found is not None:
                into[:length] = found
                found = into[:length]
        else:
            buffer = (self._scratch if into is None else into)[:length]
            store = self._only_store
            if store is not None:
                found = store.read_now(key, offset, length, buffer)
            else:
                found = self._read_now_from_any(key, offset, length, buffer)
            if found is None:
                return None
        counters = self.counters
        counters.hits += 1
        counters.hit_bytes += length
        return found

    def _read_now_from_any(
        self, key: BlockKey, offset: int, length: int, buffer: memoryview
    ) -> memoryview | None:
        for number in self._placement.order(key):
            found = self._stores[number].read_now(key, offset, length, buffer)
            if found is not None:
                return found
        return None

    async def read(self, ref: ObjectRef, block_index: int, offset: int, length: int) -> Buffer:
        """`length` >= 1 bytes at `offset` of a block, from wherever they are.

        The range must lie inside the block. The bytes stay valid and unchanged. Raises
        `OriginError` if the block isn't cached and the origin fails.
        """
        key = BlockKey(ref.object_id, block_index)
        fetched = self._admitting.get(key)
        if fetched is not None:
            self._count_hit(length)
            return fetched[offset : offset + length]
        if key not in self._flights:
            for number in self._placement.order(key):
                data = await self._stores[number].read(key, offset, length)
                if data is not None:
                    self._count_hit(length)
                    return data
        return (await self._fetched_block(ref, key))[offset : offset + length]

    async def _fetched_block(self, ref: ObjectRef, key: BlockKey) -> memoryview:
        """The block from a flight: the one under way, or a new one. A tier that could not read
        the block is not asked again, even if its index still knows it."""
        fetched = self._admitting.get(key)
        if fetched is not None:  # it came while a tier was being asked
            self._count_hit(len(fetched))
            return fetched
        flight = self._flights.get(key)
        if flight is None:
            flight = self._start_flight(ref, key.block_index, 1)
        self.counters.misses += 1
        await flight.done.wait()
        return flight.block(key.block_index)

    def _count_hit(self, length: int) -> None:
        self.counters.hits += 1
        self.counters.hit_bytes += length

    def is_cached_or_inflight(self, key: BlockKey) -> bool:
        """Whether fetching the block ahead would be a waste."""
        return (
            key in self._admitting
            or key in self._flights
            or any(store.index.find(key) is not None for store in self._stores)
        )

    def fetch(self, ref: ObjectRef, first_block: int, block_count: int) -> None:
        """Begin to fetch a run of blocks (at most 8 MiB), and return at once.

        One GET, unless some of the blocks are here or under way already: then one for every
        gap. Errors reach those who read the blocks meanwhile; else nobody.
        """
        run_start: int | None = None
        end = min(first_block + block_count, ref.block_count)
        for index in range(first_block, end):
            known = self.is_cached_or_inflight(BlockKey(ref.object_id, index))
            if known and run_start is not None:
                self._start_flight(ref, run_start, index - run_start)
                run_start = None
            elif not known and run_start is None:
                run_start = index
        if run_start is not None:
            self._start_flight(ref, run_start, end - run_start)

    def cached_fraction(self, ref: ObjectRef) -> float:
        """How much of an object version the tiers hold, by bytes; 1 for an empty object."""
        if ref.meta.size_bytes == 0:
            return 1.0
        lengths: dict[int, int] = {}
        for store in self._stores:
            for key, location in store.index.blocks_of(ref.object_id):
                lengths[key.block_index] = location.length
        return min(1.0, sum(lengths.values()) / ref.meta.size_bytes)

    # -- flights -------------------------------------------------------------------------------

    def _start_flight(self, ref: ObjectRef, first_block: int, block_count: int) -> Flight:
        """Atomic with the caller's look at `_flights`: no block ever has two."""
        if self._nursery is None:
            raise OriginUnavailableError("the cache is shutting down")
        flight = Flight(ref, first_block, block_count)
        for key in flight.block_keys():
            assert key not in self._flights
            self._flights[key] = flight
        self._nursery.start_soon(self._fly, flight)
        return flight

    async def _fly(self, flight: Flight) -> None:
        length = flight.length
        reserved = False
        try:
            await self._budget.reserve(length)
            reserved = True
            flight.data = await self._get(flight, length)
        except BaseException as error:
            flight.error = error
            self.counters.fetch_errors += 1
            if not isinstance(error, OriginError | trio.Cancelled):
                log.exception("unexpected error while fetching %r", flight.ref.path)
            if not isinstance(error, Exception):
                raise
        finally:
            # Atomic: out of the flights, into `_admitting`, and the waiters told.
            for key in flight.block_keys():
                del self._flights[key]
            if flight.data is not None:
                self._admit(flight)
            elif reserved:
                self._budget.release(length)
            flight.done.set()

    async def _get(self, flight: Flight, length: int) -> memoryview:
        ref = flight.ref
        self.counters.fetches += 1
        data = memoryview(await self._origin.read(ref.path, ref.meta, flight.offset, length))
        if data.nbytes != length:
            raise BadDataError(f"{ref.path}: got {data.nbytes} bytes instead of {length}")
        self.counters.fetched_bytes += length
        return data.cast("B") if data.format != "B" else data

    def _admit(self, flight: Flight) -> None:
        for key in flight.block_keys():
            data = flight.block(key.block_index)
            if self._stores:
                self._admitting[key] = data
                home = self._placement.order(key)[0]
                self._admissions[home].offer(Candidate(key, data, flight))
            else:
                self._settle(Candidate(key, data, flight))

    def _settle(self, candidate: Candidate) -> None:
        self._admitting.pop(candidate.key, None)
        if candidate.flight.settle_block():
            self._budget.release(candidate.flight.length)

    # -- life ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or closed. `task_status` says when reads may begin."""
        self._stopped = trio.Event()
        self._workers = self._start_workers()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for store, evictor, admission in zip(
                    self._stores, self._evictors, self._admissions, strict=True
                ):
                    nursery.start_soon(adopt_orphans, store)
                    nursery.start_soon(admission.run)
                    nursery.start_soon(evictor.run)
                    nursery.start_soon(store.commit_loop, _COMMIT_INTERVAL_S)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for worker in self._workers:
                worker.stop()
            self._stopped.set()

    def _start_workers(self) -> list[Workers]:
        readers = Workers(_READER_THREADS, "cache-read")
        workers = [readers]
        for store in self._stores:
            store.readers = readers
            store.writer = Workers(1, "cache-write")
            workers.append(store.writer)
        return workers

    async def drain(self) -> None:
        """Wait until all blocks fetched so far are stored or given up."""
        for admission in self._admissions:
            await admission.drained()

    async def aclose(self, drain_s: float = _DRAIN_S) -> None:
        """Store what was fetched (for at most `drain_s`), end `run`, commit, free the tiers."""
        with trio.CancelScope(shield=True):
            if self._nursery is not None:
                with trio.move_on_after(drain_s):
                    await self.drain()
                self._nursery.cancel_scope.cancel()
            if self._stopped is not None:
                await self._stopped.wait()
            for worker in self._workers:
                await worker.idle()  # a reader's thread may still use a slab's descriptor
            # Such a reader was woken together with us; it comes to its end before we go on.
            await trio.lowlevel.checkpoint()
            for store in self._stores:
                await store.index.commit()
                store.close()
            self._stores = []
            self._only_store = None
            self._placement = Placement([], [])

    def abandon(self) -> None:
        """Drop everything as a crash would; for tests. `run` must have ended."""
        for store in self._stores:
            store.abandon()

    def status(self) -> list[TierStatus]:
        return [store.status() for store in self._stores]
