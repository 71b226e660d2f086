"""Fetches blocks from the origin: each block has one in-flight fetch (`Flight`) at most.

All readers of a block wait for the same flight. Flights run in the cache's own nursery: a reader
that stops waiting ends only its own wait.

**Small files together.** `together` fetches many small files in one call of the origin. Each file
is a flight, which readers may join. `together` returns the files that the call did not bring, and
the caller fetches them one by one. If a reader has joined such a file, it is instead fetched alone
at once.
"""

import logging
import math
from collections.abc import Callable, Sequence

import trio

from cachefs.cache.counters import CacheCounters
from cachefs.cache.fetch.in_flight import Budget, Flight
from cachefs.cache.policies import History
from cachefs.errors import BadDataError, OriginError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.types import BlockKey, ObjectRef

log = logging.getLogger(__name__)

_FAILURE_S = 1.0
"""How long a block is not fetched again after its fetch failed slowly (`Flight.failed_slowly`)."""
_FAILURES = 4096


class Fetches:
    """All in-flight fetches of one cache, which owns this object.

    Calls `admit` with each flight that has its bytes. The cache must release these bytes from
    `budget` when it has stored them or given them up.
    """

    def __init__(
        self,
        origin: Origin,
        history: History,
        counters: CacheCounters,
        buffer_bytes: int,
        patience_s: float,
        admit: Callable[[Flight], None],
    ) -> None:
        self.flights: dict[BlockKey, Flight] = {}
        self.budget = Budget(buffer_bytes)
        self.nursery: trio.Nursery | None = None
        self.settled_at = -math.inf
        """When a block was last stored or given up, on trio's clock; set by the cache."""
        self._origin = origin
        self._history = history
        self._counters = counters
        self._buffer_bytes = buffer_bytes
        self._patience_s = patience_s
        self._admit = admit
        self._failed: dict[BlockKey, Flight] = {}
        self._landed_at = -math.inf

    @property
    def best_read_bytes(self) -> float:
        """See `Origin.best_read_bytes`."""
        return self._origin.best_read_bytes

    # -- waiting -------------------------------------------------------------------------------

    def failed_lately(self, key: BlockKey) -> Flight | None:
        """Return the block's flight that failed slowly within the last `_FAILURE_S`, or None.
        When read-ahead fails, the kernel requests the page once more. Its reader has already waited
        for the whole patience, so this second request fails at once.
        """
        failed = self._failed.get(key)
        if failed is None:
            return None
        if trio.current_time() < failed.ended_at + _FAILURE_S:
            return failed
        del self._failed[key]
        return None

    async def wait_for(self, flight: Flight) -> None:
        """Wait until the flight is over.

        Raises `OriginUnavailableError` when nothing has progressed for the patience (`patience_s`).
        A moving queue of requests or of blocks to store counts as progress, and so does a slow
        body.
        """
        flight.is_joined = True
        while not flight.done.is_set():
            origin = self._origin
            moved_at = max(
                flight.began_at, self._landed_at, origin.held_back_at, origin.progressed_at
            )
            if not flight.has_room:
                moved_at = max(moved_at, self.settled_at)
            if moved_at + self._patience_s <= trio.current_time():
                raise OriginUnavailableError(
                    f"{flight.ref.path} can't be read: nothing has come from the origin for "
                    f"{self._patience_s:.1f} s"
                )
            with trio.move_on_at(moved_at + self._patience_s):
                await flight.done.wait()

    async def fetched(self, ref: ObjectRef, block_indexes: range) -> None:
        """Wait for the in-flight fetches of these blocks. Raises `OriginError` if one failed."""
        for index in block_indexes:
            flight = self.flights.get(BlockKey(ref.object_id, index))
            if flight is not None:
                flight.is_joined = True
                await flight.done.wait()
                flight.block(index)

    # -- one flight ----------------------------------------------------------------------------

    def start(
        self, ref: ObjectRef, first_block: int, block_count: int, ahead: bool = False
    ) -> Flight:
        """Start the fetch of a run of blocks and return its flight.

        None of the blocks may be in `flights`. There must be no await between the caller's check
        and this call, so that no block has two flights. Raises `OriginUnavailableError` at
        shutdown.
        """
        nursery = self._open_nursery()
        flight = Flight(ref, first_block, block_count)
        flight.is_ahead = ahead
        for key in flight.keys:
            assert key not in self.flights
            self.flights[key] = flight
            self._history.on_miss(key)
        nursery.start_soon(self._fly, flight)
        return flight

    def put(self, ref: ObjectRef, data: memoryview) -> bool:
        """Take the only block of a file, whose bytes came without a fetch.

        Returns False if the budget has no room. There must be no await between the caller's check
        of `flights` and this call.
        """
        if not self.budget.try_reserve(data.nbytes):
            return False
        flight = Flight(ref, 0, 1)
        flight.is_ahead = flight.has_room = True
        flight.data = data
        (key,) = flight.keys
        self.flights[key] = flight
        self._history.on_miss(key)
        self._counters.fetches += 1
        self._counters.fetched_bytes += data.nbytes
        self._end(flight)
        return True

    def _open_nursery(self) -> trio.Nursery:
        if self.nursery is None:
            raise OriginUnavailableError("the cache is shutting down")
        return self.nursery

    async def _fly(self, flight: Flight) -> None:
        length = flight.length
        reserved = False
        try:
            await self.budget.reserve(length)
            reserved = flight.has_room = True
            flight.data = await self._get(flight, length)
        except BaseException as error:
            flight.error = error
            self._counters.fetch_errors += 1
            if isinstance(error, Exception) and not isinstance(error, OriginError):
                log.exception("unexpected error while fetching %r", flight.ref.path)
            if not isinstance(error, Exception):
                raise
        finally:
            if flight.data is None and reserved:
                self.budget.release(length)
            self._end(flight)

    async def _get(self, flight: Flight, length: int) -> memoryview:
        ref = flight.ref
        self._counters.fetches += 1
        log.debug("%r: %d bytes from %d on are fetched", ref.path, length, flight.offset)
        data = memoryview(await self._origin.read(ref.path, ref.meta, flight.offset, length))
        if data.nbytes != length:
            raise BadDataError(f"{ref.path}: got {data.nbytes} bytes instead of {length}")
        self._counters.fetched_bytes += length
        return data.cast("B") if data.format != "B" else data

    def _end(self, flight: Flight) -> None:
        """Remove the flight from `flights`, admit its data and wake its readers; no await."""
        for key in flight.keys:
            del self.flights[key]
        if flight.data is not None:
            self._landed_at = trio.current_time()
            self._admit(flight)
        flight.ended_at = trio.current_time()
        if flight.failed_slowly:
            if len(self._failed) > _FAILURES:
                self._failed.clear()
            self._failed.update(dict.fromkeys(flight.keys, flight))
        flight.done.set()

    # -- small files together ------------------------------------------------------------------

    async def together(
        self, refs: Sequence[ObjectRef], at_a_time: int, stopped: Callable[[], bool]
    ) -> list[ObjectRef]:
        """Fetch files of one block each in one call of the origin, until `stopped()` is true.

        Returns the files that must be fetched one by one. No file may be in `flights`, with no
        await between the caller's check and this call. `at_a_time` files are fetched in parallel.
        """
        if sum(ref.meta.size_bytes for ref in refs) > self._buffer_bytes:
            return list(refs)
        nursery = self._open_nursery()
        flights = [Flight(ref, 0, 1) for ref in refs]
        for flight in flights:
            (key,) = flight.keys
            assert key not in self.flights
            self.flights[key] = flight
        nursery.start_soon(self._fly_together, flights, at_a_time, stopped)
        for flight in flights:
            await flight.done.wait()
        return [flight.ref for flight in flights if flight.data is None]

    async def _fly_together(
        self, flights: list[Flight], at_a_time: int, stopped: Callable[[], bool]
    ) -> None:
        size_bytes = sum(flight.length for flight in flights)
        found: list[memoryview | None] = [None] * len(flights)
        reserved = shut_down = False
        try:
            await self.budget.reserve(size_bytes)
            reserved = True
            for flight in flights:
                flight.has_room = True
            wanted = [(flight.ref.path, flight.ref.meta) for flight in flights]
            found = await self._origin.read_many(wanted, at_a_time, stopped)
        except OriginError:
            pass  # each file is now fetched alone, which reports the error
        except Exception:
            log.exception("unexpected error while fetching %d files", len(flights))
        except BaseException:
            shut_down = True
            raise
        finally:
            for flight, data in zip(flights, found, strict=True):
                self._end_or_fly_on(flight, data, reserved, shut_down)

    def _end_or_fly_on(
        self, flight: Flight, data: memoryview | None, reserved: bool, shut_down: bool
    ) -> None:
        (key,) = flight.keys
        if data is not None and data.nbytes == flight.length:
            self._history.on_miss(key)
            self._counters.fetches += 1
            self._counters.fetched_bytes += flight.length
            flight.data = data
        elif reserved:
            self.budget.release(flight.length)
            flight.has_room = False
        if flight.data is None and flight.is_joined and not shut_down and self.nursery:
            self._history.on_miss(key)
            self.nursery.start_soon(self._fly, flight)
        else:
            self._end(flight)
