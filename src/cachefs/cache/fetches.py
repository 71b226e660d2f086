"""Blocks from the origin: one flight each, however many wait for it.

Flights belong to the cache's own nursery. Who gives up waiting ends his own wait, nothing else.

**Small files together.** `together` fetches many small files in one call of the origin. Each of
them is a flight, which readers may join. What the call doesn't bring goes back to the caller, who
fetches it alone; but if somebody has joined it, it flies on alone at once.
"""

import logging
import math
from collections.abc import Callable, Sequence

import trio

from cachefs.cache.counters import CacheCounters
from cachefs.cache.flights import Budget, Flight
from cachefs.cache.policies import History
from cachefs.errors import BadDataError, OriginError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.types import BlockKey, ObjectRef

log = logging.getLogger(__name__)

_FAILURE_S = 1.0
"""How long a block that could not be had, after many tries, is not tried again."""
_FAILURES = 4096


class Fetches:
    """Of one cache. `admit` is told of each flight that has brought its bytes; who has stored them,
    or given them up, releases them from `budget`."""

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
        """When a block was last stored or given up."""
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

    # -- those who wait ------------------------------------------------------------------------

    def failed_lately(self, key: BlockKey) -> Flight | None:
        """The flight in which the block was sought in vain a moment ago. The kernel asks for a page
        once more when reading ahead has failed, and its reader has no patience left for that."""
        failed = self._failed.get(key)
        if failed is None:
            return None
        if trio.current_time() < failed.ended_at + _FAILURE_S:
            return failed
        del self._failed[key]
        return None

    async def wait_for(self, flight: Flight) -> None:
        """Until it is over. A queue of requests or of blocks to store costs no reader his patience
        as long as it moves, nor does a body that comes slowly. Raises `OriginUnavailableError`
        when nothing comes."""
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
        """Wait for what is under way of these blocks. Raises `OriginError` if any of it failed."""
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
        """Atomic with the caller's look at `flights`: no block ever has two."""
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
        """Take the only block of a file, which has come without being asked for. False if there is
        no memory for it. Atomic with the caller's look at `flights`."""
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
        """Atomic: out of the flights, admitted, and the waiters told."""
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
        """Fetch files of one block each, which must not be under way, until `stopped()`; returns
        those that must be fetched alone. Atomic with the caller's look at `flights`."""
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
            pass  # those who ask alone are told
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
