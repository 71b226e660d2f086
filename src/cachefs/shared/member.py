"""`Member`: one memcached of the shared tier, with its connections, its deadlines and its breaker.

**Deadlines.** The first answer must begin within four times the 95th percentile of earlier ones, at
least `_LEAST` of the timeout and at most the timeout (`--shared-timeout`), plus the time that the
bytes take at `_BYTES_PER_S` that were asked for before. Its own bytes may take their time once it
has begun. An answer that is too late doubles the least for a while. If the loop itself was late,
the member is not blamed.

**Breaker.** After `_MOST_FAILURES` failures in a row, the member is out for a second, then twice as
long each time, up to `_MOST_OUT_S`. After that time a probe is sent, for which no reader waits.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import trio

from cachefs.errors import reason_of
from cachefs.format.shared_value import SharedFormat
from cachefs.loop_socket import CLOSED
from cachefs.shared import wire
from cachefs.shared.connection import AskedBlock, MemberConnection, Value, connect
from cachefs.shared.wire import Answer, Head, ProtocolError

log = logging.getLogger(__name__)

T = TypeVar("T")

_LEAST = 0.15
_CONNECT = 2.5
"""Connecting may take as many timeouts."""
_PATIENT = 50
"""A request for which no reader waits, such as a store, may take as many timeouts."""
_DECAY = 0.95
_BYTES_PER_S = 50e6
"""The least speed at which a healthy network of a node brings all bytes that it has asked for."""
_MOST_FAILURES = 3
_FIRST_OUT_S, _MOST_OUT_S = 1.0, 30.0
_LATE_S = 0.005
_CONNECTIONS = 8
"""memcached accepts 1,024 connections unless it is told otherwise (-c)."""
_LEAST_FREE = 0.1
"""The share of its memory that a member has free while its disk keeps up. It is 90 % and more."""
_LATENCIES = 128
_RECOMPUTE = 16


@dataclass(slots=True)
class MemberCounters:
    """Counters of one member, in blocks."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    bad_values: int = 0
    failures: int = 0

    def add(self, other: "MemberCounters") -> None:
        """Add the counters of another member."""
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class Traffic:
    """The bytes that all members together are asked for now: they share this node's network."""

    def __init__(self) -> None:
        self.asked_bytes = 0


class Latencies:
    """The latest latencies. The percentiles are computed for every sixteenth only."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATENCIES)
        self._new = 0
        self._p50 = self._p95 = math.nan

    def note(self, took_s: float) -> None:
        """Add one latency."""
        self._latest.append(took_s)
        self._new += 1
        if self._new >= _RECOMPUTE or len(self._latest) < _RECOMPUTE:
            self._new = 0
            ordered = sorted(self._latest)
            self._p50 = ordered[len(ordered) // 2]
            self._p95 = ordered[len(ordered) * 95 // 100]

    @property
    def p50_s(self) -> float | None:
        """The median; None without any."""
        return None if math.isnan(self._p50) else self._p50

    @property
    def p95_s(self) -> float | None:
        """The 95th percentile; None without any."""
        return None if math.isnan(self._p95) else self._p95


class Member:
    """One member. Only the event loop may use it. No method raises an error of the member: a
    failure is a miss."""

    def __init__(
        self,
        address: str,
        host: str,
        port: int,
        shared_format: SharedFormat,
        timeout_s: float,
        traffic: Traffic,
        on_out: Callable[[], None] = lambda: None,
    ) -> None:
        """`address` is what the member is called; `host` is an IP address. A reader waits for
        `timeout_s` at most, and longer for many bytes. Calls `on_out` when
        `is_out` has changed."""
        self.address = address
        self._host, self._port = host, port
        self._on_out = on_out
        self.counters = MemberCounters()
        self.latencies = Latencies()
        self.problem: str | None = None
        """Why the last request failed; None if it did not."""
        self.out_since: float | None = None
        """When the member began to be out, on trio's clock."""
        self._format = shared_format
        self._timeout_s = timeout_s
        self._patient_s = _PATIENT * timeout_s
        self._traffic = traffic
        self._idle: list[MemberConnection] = []
        self._free_places = _CONNECTIONS
        self._waiting = trio.lowlevel.ParkingLot()
        self._least_s = _LEAST * timeout_s
        """The shortest deadline; longer after answers that came too late."""
        self._failures = 0
        self._failed_at = -math.inf
        self._out_s = 0.0
        self._out_until = -math.inf
        self._is_closed = False

    # -- breaker -------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether anything but probes is sent to it."""
        return self.out_since is None and not self._is_closed

    @property
    def is_out(self) -> bool:
        """Whether the member has failed and no probe has succeeded since. Nothing but probes is
        sent to it then."""
        return self.out_since is not None

    def is_at(self, host: str, port: int) -> bool:
        """Whether it has this IP address and port."""
        return (host, port) == (self._host, self._port)

    async def probe(self) -> None:
        """Ask a member that is out whether it answers again, if it is time for that."""
        if self.is_out and trio.current_time() >= self._out_until:
            probe = partial(MemberConnection.heads, commands=(wire.PROBE,))
            if await self._try(probe, self._timeout_s, is_for_reader=True) is None:
                self._out_s = min(2 * self._out_s, _MOST_OUT_S)
                self._out_until = trio.current_time() + self._out_s

    def _note_success(self) -> None:
        self._failures = 0
        self.problem = None
        if self.out_since is None:
            self._out_s = 0.0
        else:
            self.out_since = None
            self._on_out()
            log.info("the member %s of the shared tier answers again", self.address)

    def _note_failure(self, problem: str, began_at: float) -> None:
        """Count a failure of a request that began at `began_at`. All that were under way at a
        failure count as one, because one short pause delays all of them."""
        self.problem = problem
        self.counters.failures += 1
        if began_at < self._failed_at:
            return
        self._failed_at = trio.current_time()
        self._failures += 1
        if self._failures >= _MOST_FAILURES and self.out_since is None:
            self.out_since = trio.current_time()
            # Longer if it was out a moment ago, and has answered nothing but a probe since.
            self._out_s = min(max(2 * self._out_s, _FIRST_OUT_S), _MOST_OUT_S)
            self._out_until = self.out_since + self._out_s
            self._close_idle()
            self._on_out()
            log.info("the member %s of the shared tier is out: %s", self.address, problem)

    # -- requests ------------------------------------------------------------------------------

    async def ask(self, asked: Sequence[AskedBlock]) -> None:
        """Ask for blocks and fill in the answers. Those that have not come in time are misses."""
        is_sent = False
        scopes: list[trio.CancelScope] = []

        async def ask(connection: MemberConnection) -> None:
            nonlocal is_sent
            is_sent, began_at = True, trio.current_time()

            def note_first() -> None:
                self.latencies.note(trio.current_time() - began_at)
                scopes[0].deadline += size_bytes / _BYTES_PER_S

            await connection.ask(asked, self._format, note_first)
            self._least_s = max(_DECAY * self._least_s, _LEAST * self._timeout_s)

        size_bytes, traffic = sum(block.length for block in asked), self._traffic
        deadline_s = self._deadline_s() + traffic.asked_bytes / _BYTES_PER_S
        traffic.asked_bytes += size_bytes
        try:
            await self._request(ask, deadline_s, is_for_reader=True, on_begin=scopes.append)
        finally:
            traffic.asked_bytes -= size_bytes
        counters = self.counters
        for block in asked:
            if not is_sent:
                block.answer = Answer.LEFT_OUT
            if block.answer is Answer.HIT:
                counters.hits += 1
                counters.hit_bytes += block.length
            else:
                counters.misses += 1
                counters.bad_values += block.answer is Answer.BAD

    def _deadline_s(self) -> float:
        p95_s = self.latencies.p95_s
        most_s = self._timeout_s
        return most_s if p95_s is None else min(max(4 * p95_s, self._least_s), most_s)

    async def heads(self, commands: Sequence[bytes]) -> list[Head] | None:
        """Send commands whose answers have no values; None if the member does not answer."""
        return await self._request(
            partial(MemberConnection.heads, commands=commands), self._patient_s
        )

    async def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Store blocks, by key. Return how many of them the member has taken."""
        prefix = self._format.prefix
        values = [Value(key, prefix(key, data), data) for key, data in blocks]
        store = partial(MemberConnection.store, values=values)
        answers = await self._request(store, self._patient_s)
        if answers is None:
            return 0
        taken = [data for (_, data), is_taken in zip(blocks, answers, strict=True) if is_taken]
        self.counters.stored_blocks += len(taken)
        self.counters.stored_bytes += sum(data.nbytes for data in taken)
        return len(taken)

    async def is_short_of_memory(self) -> bool:
        """Whether blocks come faster than the member writes them to its disk. memcached then takes
        the memory for new ones from the keys of old ones, which are lost."""
        stats = await self._request(MemberConnection.stats, self._patient_s)
        if not stats or b"extstore_limit_maxbytes" not in stats:
            return False
        free_bytes = stats.get(b"slab_global_page_pool", 0) << 20
        return free_bytes < _LEAST_FREE * stats.get(b"limit_maxbytes", 0)

    async def delete(self, keys: Sequence[bytes]) -> bool:
        """Delete blocks. Return whether the member has done it."""
        delete = partial(MemberConnection.delete, keys=keys)
        return await self._request(delete, self._patient_s) is not None

    async def _request(
        self,
        request: Callable[[MemberConnection], Awaitable[T]],
        deadline_s: float,
        is_for_reader: bool = False,
        on_begin: Callable[[trio.CancelScope], None] = lambda scope: None,
    ) -> T | None:
        """Send a request unless the member is out. Return None if it fails.

        `on_begin` gets the scope with the deadline, which the request may move."""
        if self.is_out:
            return None
        return await self._try(request, deadline_s, is_for_reader, on_begin)

    async def _try(
        self,
        request: Callable[[MemberConnection], Awaitable[T]],
        deadline_s: float,
        is_for_reader: bool,
        on_begin: Callable[[trio.CancelScope], None] = lambda scope: None,
    ) -> T | None:
        """Send a request on an idle connection or a new one. Return None if it fails.

        If a request of a reader or a probe fails, the member may count as out. A failed store does
        not count, because a member that is too slow for readers may be fast enough for stores."""
        if self._is_closed:
            return None
        problem, began_at = "", trio.current_time()
        has_place = False
        try:
            with trio.move_on_after(deadline_s) as scope:
                on_begin(scope)
                if self._free_places:
                    self._free_places -= 1
                else:
                    await self._waiting.park()
                    began_at = trio.current_time()
                has_place = True
                if scope.cancel_called:  # it waited for its place too long: not the member's fault
                    return None
                result = await self._on_connection(request, scope, deadline_s)
                if is_for_reader:
                    self._note_success()
                return result
            is_late = trio.current_time() > scope.deadline + _LATE_S
            if has_place and not is_late:
                problem = f"it has not answered within {1e3 * deadline_s:.0f} ms"
        except ProtocolError as error:
            problem = str(error)
        except EOFError:
            problem = "it has closed the connection"
        except OSError as error:
            problem = reason_of(error)
        finally:
            if has_place and not self._waiting.unpark():
                self._free_places += 1
        if problem and is_for_reader:
            self._least_s = min(2 * self._deadline_s(), self._timeout_s)
            self._note_failure(problem, began_at)
        return None

    async def _on_connection(
        self,
        request: Callable[[MemberConnection], Awaitable[T]],
        scope: trio.CancelScope,
        deadline_s: float,
    ) -> T:
        while self._idle and not self._is_closed:
            connection = self._idle.pop()
            scope.deadline = trio.current_time() + deadline_s
            try:
                return await self._use(connection, request)
            except CLOSED:
                if connection.has_answered:
                    raise
                # The member was started anew, or has closed the idle connection.
        scope.deadline = trio.current_time() + _CONNECT * self._timeout_s
        connection = await connect(self._host, self._port)
        scope.deadline = trio.current_time() + deadline_s
        return await self._use(connection, request)

    async def _use(
        self, connection: MemberConnection, request: Callable[[MemberConnection], Awaitable[T]]
    ) -> T:
        try:
            return await request(connection)
        finally:
            if connection.is_in_order and not (self._is_closed or self.is_out):
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close idle connections now, and the others when they are given back."""
        self._is_closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
