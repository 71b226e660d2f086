"""`ResilientOrigin` over an origin in memory, on a clock that jumps."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    NotFoundError,
    ObjectChangedError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
)
from cachefs.origin.body import Body
from cachefs.origin.names import Pages
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import Buffer, Entry, ObjectMeta
from tests.memory_origin import MemoryOrigin

DOWN = OriginUnavailableError("down")
MIB = 1 << 20
PIECE = 16 << 10
OPENS = "does not answer; what is not cached fails at once"
CLOSES = "answers again"


class Store(MemoryOrigin):
    """`state` decides what every request meets; None: nothing unusual."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.01)
        self.state: Callable[[], Awaitable[None]] | None = None
        self.requests = 0
        self.meta = self.put("f", b"data")

    async def _request(self) -> None:
        self.requests += 1
        if self.state is not None:
            await self.state()
        await super()._request()

    async def refuse(self) -> None:
        raise DOWN

    async def be_silent(self) -> None:
        await trio.sleep_forever()


def resilient(store: Store, **settings: float) -> ResilientOrigin:
    return ResilientOrigin(store, Resilience(**settings), random.Random(1))  # type: ignore[arg-type]


async def test_the_quickest_answer_tells_how_far_the_origin_is(autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    assert origin.quickest_s == 0.0
    store.delay_s = 0.03
    meta = await origin.stat("f")
    assert isinstance(meta, ObjectMeta)
    assert origin.quickest_s == pytest.approx(0.03)
    store.delay_s = 0.3  # a busy origin is not a far one
    await origin.read("f", meta, 0, 4)
    assert origin.quickest_s == pytest.approx(0.03)
    store.delay_s = 0.005
    await origin.stat("")  # costs no request
    await origin.read("f", meta, 0, 4)
    assert origin.quickest_s == pytest.approx(0.005)


@asynccontextmanager
async def running(store: Store, **settings: float) -> AsyncIterator[ResilientOrigin]:
    origin = resilient(store, **settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(origin.run)
        yield origin
        nursery.cancel_scope.cancel()


async def read(origin: ResilientOrigin, store: Store) -> Buffer:
    return await origin.read("f", store.meta, 0, 4)


async def seconds_to_fail(origin: ResilientOrigin, store: Store, match: str | None = None) -> float:
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError, match=match):
        await read(origin, store)
    return trio.current_time() - began_at


@pytest.mark.parametrize("error", [DOWN, BadDataError("short"), OriginBusyError("busy")])
async def test_a_few_failures_are_not_seen(error: OriginError, autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    store.fail_next(3, error)
    assert await read(origin, store) == b"data"
    store.fail_next(3, error)
    assert await origin.stat("f") == store.meta
    assert origin.state()["retries"] == 6
    assert origin.state()["failed_calls"] == 0


async def test_after_a_pause_that_was_too_long_the_failure_before_it_is_told(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a task continues late. A request without any time would hide the cause."""
    store = Store()
    origin = resilient(store)
    back_off = origin._back_off

    async def oversleep(
        tries: int, failure: OriginError, deadline: float, patient_until: float
    ) -> float:
        deadline = await back_off(tries, failure, deadline, patient_until)
        await trio.sleep(100)
        return deadline

    monkeypatch.setattr(origin, "_back_off", oversleep)
    store.state = store.refuse
    for _ in range(3):
        assert await seconds_to_fail(origin, store, match="down") > 100
    assert store.requests == 3
    store.state = None
    assert await read(origin, store) == b"data", "all slots are free again"


@pytest.mark.parametrize("kind", [NotFoundError, AccessDeniedError, ObjectChangedError])
async def test_definite_answers_are_final(
    kind: type[OriginError], autojump_clock: MockClock
) -> None:
    store = Store()
    origin = resilient(store)
    store.fail_next(1, kind("no"))
    with pytest.raises(kind):
        await read(origin, store)
    assert store.requests == 1


async def test_one_silence_costs_one_request(autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)

    async def be_silent_once() -> None:
        store.state = None
        await trio.sleep_forever()

    store.state = be_silent_once
    began_at = trio.current_time()
    assert await read(origin, store) == b"data"
    assert trio.current_time() - began_at < 3


@pytest.mark.parametrize("state", ["refuse", "be_silent"])
async def test_a_call_ends_within_the_read_timeout(state: str, autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    store.state = getattr(store, state)
    for timeout_s in (5.0, 5.0):
        assert 3 < await seconds_to_fail(origin, store) <= timeout_s
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError):
        await origin.stat("f")
    assert trio.current_time() - began_at <= 5
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError):
        [page async for page in origin.list_dir("")]
    assert trio.current_time() - began_at <= 5


async def test_answers_that_are_always_wrong(autojump_clock: MockClock) -> None:
    store = Store()
    async with running(store) as origin:
        store.fail_next(1000, BadDataError("3 bytes"))
        assert 3 < await seconds_to_fail(origin, store, "3 bytes, each time it was asked") <= 5
        assert not origin.is_down


async def test_a_page_is_asked_for_again_not_the_listing(autojump_clock: MockClock) -> None:
    store = Store()
    store.page_size = 2
    for index in range(6):
        store.put(f"d/{index}", b"")
    origin = resilient(store)
    names: list[str] = []
    async for page in origin.list_dir("d"):
        names += [entry.name for entry in page]
        store.fail_next(2, DOWN)
    assert names == list("012345")
    assert store.counters.lists == 3 + 2 * 2


@pytest.mark.expect_log(OPENS)
@pytest.mark.expect_log(CLOSES)
@pytest.mark.parametrize("state", ["refuse", "be_silent"])
async def test_an_outage(state: str, autojump_clock: MockClock) -> None:
    store = Store()
    async with running(store) as origin:
        store.state = getattr(store, state)
        assert await seconds_to_fail(origin, store) > 3
        await trio.sleep(1.5)
        assert origin.is_down
        for _ in range(10):
            assert await seconds_to_fail(origin, store, "does not answer .since") == 0
            await trio.sleep(10)
        assert origin.state()["down_since"] is not None
        store.state = None
        await trio.sleep(1.2)
        assert not origin.is_down
        assert await read(origin, store) == b"data"
        requests = store.requests
        await trio.sleep(60)
        assert store.requests == requests  # no probe when all is well


async def test_the_check_at_the_start(autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    store.fail_next(1, DOWN)
    await origin.check()
    store.delay_s = 3.5  # a large directory, perhaps
    await origin.check()
    store.state = store.be_silent
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError):
        await origin.check()
    assert trio.current_time() - began_at < 5


async def test_a_short_outage_is_waited_out(autojump_clock: MockClock) -> None:
    store = Store()
    async with running(store) as origin:
        store.state = store.refuse
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(read, origin, store)
            await trio.sleep(3.0)
            store.state = None
        assert origin.state()["failed_calls"] == 0


@pytest.mark.expect_log("the listing takes longer than --request-timeout")
async def test_one_path_that_is_never_answered_is_no_outage(autojump_clock: MockClock) -> None:
    store = Store()

    async def look_up_nothing(path: str) -> None:
        await trio.sleep_forever()

    store.stat = look_up_nothing  # type: ignore[method-assign]
    async with running(store) as origin:
        for _ in range(5):
            with pytest.raises(OriginUnavailableError):
                await origin.stat("f")
            assert not origin.is_down
        assert await read(origin, store) == b"data"


async def test_one_bad_object_does_not_open_the_breaker(autojump_clock: MockClock) -> None:
    store = Store()
    store.put("good", b"good")

    async with running(store) as origin:
        read_well = store.read

        async def read_badly(path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
            if path == "f":
                raise DOWN
            return await read_well(path, meta, offset, length)

        store.read = read_badly  # type: ignore[method-assign]
        for _ in range(5):
            assert await seconds_to_fail(origin, store, "down") > 3
            assert not origin.is_down


async def test_a_refusal_is_an_answer(autojump_clock: MockClock) -> None:
    store = Store()
    async with running(store) as origin:
        store.fail_next(1000, RefusedError("archived"))
        for _ in range(10):
            with pytest.raises(RefusedError):
                await read(origin, store)
        assert store.requests == 10
        await trio.sleep(10)
        assert not origin.is_down
        assert origin.state()["failed_calls"] == 0


async def test_one_bad_object_and_a_check_that_fails(autojump_clock: MockClock) -> None:
    """A source whose listing takes for ever, for example. What can be read stays readable."""

    class OneBad(Store):
        def __init__(self) -> None:
            super().__init__()
            self.put("good", b"good")
            self.checks = 0

        async def check(self) -> None:
            self.checks += 1
            raise DOWN

        async def stat(self, path: str) -> ObjectMeta:
            if path == "f":
                raise DOWN
            found = await super().stat(path)
            assert isinstance(found, ObjectMeta)
            return found

        stat_unlisted = stat

    store = OneBad()
    async with running(store) as origin:
        for _ in range(5):
            await origin.stat("good")
            with pytest.raises(OriginUnavailableError):
                await origin.stat("f")
            await trio.sleep(3)
            assert not origin.is_down
        assert store.checks


async def test_a_whole_listing_may_take_long(autojump_clock: MockClock) -> None:
    class Slow(Store):
        lists_in_one_piece = True

        async def _request(self) -> None:
            await trio.sleep(30)

    store = Slow()
    pages = [page async for page in resilient(store).list_dir("")]
    assert pages == [[Entry("f", store.meta)]]


# Load


class Small(Store):
    """Serves `CAPACITY` at a time, 0.1 s each, and sends everybody else away."""

    CAPACITY = 4

    def __init__(self, retry_after_s: float | None = None) -> None:
        super().__init__()
        self.delay_s = 0.1
        self._retry_after_s = retry_after_s
        self._serving = 0

    async def _request(self) -> None:
        if self._serving >= self.CAPACITY:
            self.requests += 1
            raise OriginBusyError("busy", self._retry_after_s)
        self._serving += 1
        try:
            await super()._request()
        finally:
            self._serving -= 1


@pytest.mark.parametrize("retry_after_s", [None, 1.0])
async def test_a_storm_becomes_a_queue(
    retry_after_s: float | None, autojump_clock: MockClock
) -> None:
    store = Small(retry_after_s)
    async with running(store) as origin:
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(400):
                nursery.start_soon(read, origin, store)
        took_s = trio.current_time() - began_at
        assert origin.state()["failed_calls"] == 0
        assert not origin.is_down
    assert took_s < 1.4 * 400 * 0.1 / store.CAPACITY, "the origin was kept busy"
    assert took_s > 5, "queueing costs nobody his deadline"
    assert store.requests < 1.4 * 400


async def test_an_origin_that_is_always_busy(autojump_clock: MockClock) -> None:
    store = Store()

    async def be_busy() -> None:
        raise OriginBusyError("busy", 60.0)

    async with running(store) as origin:
        store.state = be_busy
        for _ in range(3):
            assert await seconds_to_fail(origin, store, "busy") <= 5
            assert not origin.is_down
        store.state = None
        assert await read(origin, store) == b"data"


async def test_a_last_try_without_time_does_not_hide_the_cause(autojump_clock: MockClock) -> None:
    store = Store()

    async def say_why_late() -> None:
        await trio.sleep(1.2)
        raise OriginUnavailableError("the store's own words")

    async with running(store) as origin:
        store.state = say_why_late
        assert await seconds_to_fail(origin, store, "own words") <= 5


async def test_objects_that_are_never_answered_take_no_slots_from_others(
    autojump_clock: MockClock,
) -> None:
    store = Store()
    others = store.put("others", b"data")
    inner_read = store.read

    async def read_some(path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        if path == "f":
            await trio.sleep_forever()
        return await inner_read(path, meta, offset, length)

    store.read = read_some  # type: ignore[method-assign]
    longest_s = 0.0
    async with running(store) as origin, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(seconds_to_fail, origin, store)
        while nursery.child_tasks:
            began_at = trio.current_time()
            await origin.read("others", others, 0, 4)
            longest_s = max(longest_s, trio.current_time() - began_at)
            await trio.sleep(0.05)
        assert origin.state()["limit"] > 8
    assert longest_s < 1


@pytest.mark.parametrize("retry_after_s", [None, 3600.0])
async def test_an_object_that_is_always_busy(
    retry_after_s: float | None, autojump_clock: MockClock
) -> None:
    """Its reader gets an error, although the origin serves others all the time."""
    store = Store()
    others = store.put("others", b"data")

    async def read_others(origin: ResilientOrigin) -> None:
        while True:
            await origin.read("others", others, 0, 4)
            await trio.sleep(0.1)

    inner_read = store.read

    async def read_unless_busy(path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        if path == "f":
            raise OriginBusyError("busy", retry_after_s)
        return await inner_read(path, meta, offset, length)

    store.read = read_unless_busy  # type: ignore[method-assign]
    async with running(store) as origin, trio.open_nursery() as nursery:
        nursery.start_soon(read_others, origin)
        with trio.fail_after(300):
            assert 10 < await seconds_to_fail(origin, store, "busy") < 60
        nursery.cancel_scope.cancel()


async def test_retry_after_is_kept(autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    store.fail_next(1, OriginBusyError("busy", 3.0))
    began_at = trio.current_time()
    await read(origin, store)
    assert 3 <= trio.current_time() - began_at < 4


async def test_a_silent_server_does_not_use_up_the_slots(autojump_clock: MockClock) -> None:
    store = Store()
    async with running(store, max_downloads=2) as origin:
        store.state = store.be_silent
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(seconds_to_fail, origin, store)
            await trio.sleep(4)
            store.state = None
            began_at = trio.current_time()
            nursery.cancel_scope.cancel()
        await read(origin, store)
        assert trio.current_time() - began_at < 2
        assert origin.state()["in_flight"] == 0


async def test_at_most_so_many_at_a_time_changeable(autojump_clock: MockClock) -> None:
    store = Store()
    store.delay_s = 1
    origin = resilient(store, max_downloads=2)
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(read, origin, store)
        await trio.sleep(0.5)
        assert (origin.state()["in_flight"], origin.state()["queued"]) == (2, 6)
        origin.max_downloads = 5
        assert (origin.state()["in_flight"], origin.state()["queued"]) == (5, 3)


async def test_many_at_a_time_take_a_slot_each(autojump_clock: MockClock) -> None:
    store = Store()
    wanted = [(f"g{number}", store.put(f"g{number}", b"data")) for number in range(8)]
    origin = resilient(store, max_downloads=5)
    assert not origin.reads_many
    store.reads_many = True
    assert origin.reads_many
    most = 0

    async def look(path: str, offset: int, length: int) -> None:
        nonlocal most
        most = max(most, origin.state()["in_flight"])

    store.on_read = look
    found = await origin.read_many(wanted, 8, lambda: False)
    assert None not in found
    assert store.requests == 8
    assert most == 5
    assert origin.state()["in_flight"] == 0
    store.fail_next(2, DOWN)
    found = await origin.read_many(wanted[:4], 8, lambda: False)
    assert found.count(None) == 2
    assert origin.state()["retries"] == 0
    store.state = store.be_silent
    began_at = trio.current_time()
    assert await origin.read_many(wanted[:2], 8, lambda: False) == [None, None]
    assert trio.current_time() - began_at < 5
    assert origin.state()["in_flight"] == 0


async def test_many_at_a_time_within_the_download_limit(autojump_clock: MockClock) -> None:
    store = Store()
    store.reads_many = True
    wanted = [(f"g{number}", store.put(f"g{number}", bytes(1000))) for number in range(4)]
    origin = resilient(store, download_limit=1000.0)
    began_at = trio.current_time()
    for _ in range(5):
        await origin.read_many(wanted, 8, lambda: False)
    assert 15.5 < trio.current_time() - began_at < 17
    store.fail_next(4, DOWN)
    await origin.read_many(wanted, 8, lambda: False)
    began_at = trio.current_time()
    await origin.read_many(wanted, 8, lambda: False)
    assert trio.current_time() - began_at < 0.1, "what did not come costs nothing"


async def test_the_download_limit(autojump_clock: MockClock) -> None:
    store = Store()
    meta = store.put("big", bytes(1 << 20))
    origin = resilient(store, download_limit=1 << 20)
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(21):
            nursery.start_soon(origin.read, "big", meta, 0, 1 << 20)
    assert trio.current_time() - began_at == pytest.approx(20, rel=0.05)
    assert trio.current_time() - origin.held_back_at < 2


# Hedged reads


async def hedging(store: Store, **settings: float) -> ResilientOrigin:
    """An origin that knows how long reads take: 0.01 s."""
    origin = resilient(store, hedge=True, **settings)
    for _ in range(60):
        await read(origin, store)
    return origin


async def test_a_second_request_overtakes_a_straggler(autojump_clock: MockClock) -> None:
    store = Store()
    origin = await hedging(store)

    async def straggle_once() -> None:
        store.state = None
        await trio.sleep(1.5)

    store.state = straggle_once
    began_at = trio.current_time()
    assert await read(origin, store) == b"data"
    assert trio.current_time() - began_at < 0.1
    assert origin.state()["hedges"] == 1
    assert origin.state()["in_flight"] == 0


async def test_no_second_request_without_a_slot_or_when_all_is_quick(
    autojump_clock: MockClock,
) -> None:
    store = Store()
    origin = await hedging(store, max_downloads=1)
    assert origin.state()["hedges"] == 0

    async def straggle() -> None:
        await trio.sleep(0.5)

    store.state = straggle
    assert await read(origin, store) == b"data"
    assert origin.state()["hedges"] == 0


async def test_a_hedged_read_that_fails(autojump_clock: MockClock) -> None:
    store = Store()
    origin = await hedging(store)
    store.fail_next(1, DOWN)
    assert await read(origin, store) == b"data"
    store.fail_next(1, ObjectChangedError("changed"))
    with pytest.raises(ObjectChangedError):
        await read(origin, store)


class SlowStore(Store):
    """Tells nothing of a body before all of it is there, at so many bytes a second for all."""

    bytes_per_s = float(MIB)

    def __init__(self) -> None:
        super().__init__()
        self._free_at = 0.0
        self.lengths: list[int] = []

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.lengths.append(length)
        began_at = trio.current_time()
        self._free_at = max(self._free_at, began_at) + length / self.bytes_per_s
        try:
            await trio.sleep_until(self._free_at)
        except trio.Cancelled:
            self._free_at = trio.current_time()  # the line is free again
            raise
        return await super().read(path, meta, offset, length)


async def test_over_a_slow_line_less_is_asked_for_at_a_time(autojump_clock: MockClock) -> None:
    store = SlowStore()
    data = bytes(range(256)) * (32 * MIB // 256)
    meta = store.put("large", data)
    origin = resilient(store)
    for start in (0, 8 * MIB, 16 * MIB, 24 * MIB):
        found = await origin.read("large", meta, start, 8 * MIB)
        assert bytes(found) == data[start : start + 8 * MIB]
    assert store.lengths[0] == 8 * MIB
    assert MIB // 4 <= min(store.lengths) < 8 * MIB
    assert origin.best_read_bytes <= 8 * MIB
    store.bytes_per_s = 100.0 * MIB
    for _ in range(10):
        await origin.read("large", meta, 0, 8 * MIB)
    assert store.lengths[-1] == 8 * MIB
    assert origin.best_read_bytes > 8 * MIB


class SharedLine(Store):
    """All bodies come at once, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self._free_at = 0.0

    async def read_body(
        self, path: str, meta: ObjectMeta, offset: int, length: int, body: Body | None
    ) -> Buffer:
        assert body is not None
        come = 0
        moved = body.follow(lambda: come)
        memoryview(body.room())[:] = bytes(length)
        for _ in range(0, length, PIECE):
            self._free_at = max(self._free_at, trio.current_time()) + PIECE / MIB
            await trio.sleep_until(self._free_at)
            come += PIECE
            moved()
        return body.take()


async def test_bodies_that_hardly_move_make_fewer_requests(autojump_clock: MockClock) -> None:
    store = SharedLine()
    meta = store.put("large", bytes(64 * MIB))
    origin = resilient(store)
    async with trio.open_nursery() as nursery:
        for index in range(64):
            nursery.start_soon(origin.read, "large", meta, index * MIB, MIB)
    assert origin.state()["limit"] < 64
    assert origin.state()["failed_calls"] == 0
    assert origin.best_read_bytes < 2 * MIB


async def test_after_a_gap_a_call_gets_one_more_try(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last try may have been under way while the process did not run."""
    store = Store()
    origin = resilient(store)
    gap_at = trio.current_time() + 2.5
    store.state = store.be_silent

    def had_gap_since(began_at: float) -> bool:
        return began_at <= gap_at <= trio.current_time()

    async def come_back() -> None:
        await trio.sleep(3.0)
        store.state = None

    monkeypatch.setattr("cachefs.origin.resilience.resilient.had_gap_since", had_gap_since)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_back)
        assert await origin.read("f", store.meta, 0, 4) == b"data"


class SlowListing(Store):
    """Each page takes `listing_s`; everything else is quick, unless `state` says otherwise."""

    listing_s = 20.0

    def list_dir(self, path: str, below: object = None) -> Pages:
        async def page() -> list[Entry] | None:
            await trio.sleep(self.listing_s)
            return [] if self.state is None else await trio.sleep_forever()

        return Pages(page)


async def first_page(origin: ResilientOrigin) -> list[Entry]:
    return await anext(aiter(origin.list_dir("d")))


@pytest.mark.expect_log("the listing takes longer than --request-timeout")
async def test_a_slow_listing_of_an_origin_that_answers(autojump_clock: MockClock) -> None:
    store = SlowListing()
    async with running(store) as origin:
        assert await first_page(origin) == []
        assert not origin.is_down
        assert origin.state()["retries"] == 0
        assert origin.state()["failed_calls"] == 0


@pytest.mark.expect_log("the listing takes longer than --request-timeout")
async def test_a_listing_that_never_comes(autojump_clock: MockClock) -> None:
    store = SlowListing()
    store.listing_s = 1e6
    async with running(store) as origin:
        began_at = trio.current_time()
        with pytest.raises(OriginUnavailableError, match="can't be listed: no answer within"):
            await first_page(origin)
        assert 60 < trio.current_time() - began_at < 70
        assert not origin.is_down


@pytest.mark.expect_log("the listing takes longer than --request-timeout")
async def test_a_slow_listing_does_not_keep_the_last_slot(autojump_clock: MockClock) -> None:
    store = SlowListing()
    async with running(store) as origin, trio.open_nursery() as nursery:
        origin._slots.limit.refused(trio.current_time(), trio.current_time(), 1)
        assert origin.state()["limit"] == 1
        nursery.start_soon(first_page, origin)
        await trio.testing.wait_all_tasks_blocked()
        began_at = trio.current_time()
        assert await read(origin, store) == b"data"
        assert trio.current_time() - began_at < 5


async def test_a_listing_of_an_origin_that_is_silent(autojump_clock: MockClock) -> None:
    store = SlowListing()
    store.state = store.be_silent
    origin = resilient(store)
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError):
        await first_page(origin)
    assert trio.current_time() - began_at <= 5


@pytest.mark.expect_log("the listing takes longer than --request-timeout")
async def test_a_look_up_that_needs_a_slow_listing(autojump_clock: MockClock) -> None:
    class SlowLookUp(Store):
        lists = 0

        async def stat(self, path: str) -> None:
            self.lists += 1
            await trio.sleep(20)

    store = SlowLookUp()
    async with running(store) as origin:
        assert await origin.stat("f") is None
        assert store.lists == 2
        assert not origin.is_down
