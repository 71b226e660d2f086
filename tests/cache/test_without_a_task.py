"""Fetches that no task waits for: if one fails, a task does it, or it leaves nothing."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from cachefs.errors import OriginBusyError, OriginUnavailableError
from cachefs.origin.options import QUICK_READ_S
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import Buffer, ObjectMeta, Priority, Reply, Turn
from tests.cache.harness import (
    MIB,
    key_of,
    open_tier,
    put,
    put_many,
    read_whole,
    serving,
    until,
)
from tests.memory_origin import MemoryOrigin

SIZE = 5000


class Store(MemoryOrigin):
    """Also reads without a task. Such a read ends when the test calls one of `ends`. What it sends
    to the kernel is in `sent`."""

    sends = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.ends: list[Callable[[memoryview | None], None]] = []
        self.begins: Exception | None = None

    def begin_read(
        self,
        path: str,
        meta: ObjectMeta,
        on_read: Callable[[memoryview | None], None],
        reply: Reply | None = None,
    ) -> bool:
        """See `Origin.begin_read`."""
        if self.begins is not None:
            raise self.begins
        self.ends.append(on_read)
        return True

    def send(
        self, parts: Sequence[memoryview], reply: Reply, on_sent: Callable[[bool], None]
    ) -> bool:
        """See `Origin.send`."""
        assert len(parts) <= 2
        self.sent.append(b"".join(parts))
        on_sent(True)
        return True

    def end(self) -> None:
        """End the first read with its bytes."""
        self.ends.pop(0)(memoryview(self.expected("a")))


def begin(origin: ResilientOrigin, meta: ObjectMeta) -> bool:
    return origin.begin_read("a", meta, lambda data: None)


@pytest.mark.expect_log("unexpected error before 'a' is fetched")
async def test_what_can_not_begin_is_read_by_a_task(tmp_path: Path) -> None:
    store = Store()
    ref = put(store, "a", SIZE)
    store.begins = RuntimeError("can't start new thread")
    origin = ResilientOrigin(store, Resilience())
    async with serving(origin, open_tier(tmp_path)) as cache:  # type: ignore[arg-type]
        assert not cache.reply(ref, Reply(-1, 12, 0, SIZE), lambda is_replied: None)
        assert cache.held_bytes == origin.state()["in_flight"] == 0
        assert await read_whole(cache, ref) == store.expected("a")
        assert origin.state()["in_flight"] == 0


@pytest.mark.parametrize("has_bytes", [False, True])
async def test_what_comes_after_the_end_is_dropped(tmp_path: Path, has_bytes: bool) -> None:
    store = Store()
    ref = put(store, "a", SIZE)
    replied: list[bool] = []
    async with serving(store, open_tier(tmp_path)) as cache:
        assert cache.reply(ref, Reply(-1, 12, 0, SIZE), replied.append)
    data = memoryview(store.expected("a")) if has_bytes else None
    store.ends.pop()(data)
    assert replied == [has_bytes]
    assert cache.held_bytes == cache.fetching_count == cache.storing_count == 0


async def test_what_fails_during_the_end_disturbs_nobody(tmp_path: Path) -> None:
    """No task is started any more when the last one has ended."""
    store = Store()
    refs = put_many(store, 7, SIZE)
    replied: list[bool] = []
    async with serving(store, open_tier(tmp_path)) as cache:
        tasks = cache._nursery
        assert tasks is not None

        async def fail_at_the_end() -> None:
            while tasks.child_tasks:
                await trio.lowlevel.cancel_shielded_checkpoint()
            store.ends.pop()(None)

        async with trio.open_nursery() as nursery:
            for ref in refs:
                assert cache.reply(ref, Reply(-1, 12, 0, SIZE), replied.append)
                nursery.start_soon(fail_at_the_end)
            await cache.aclose()
    assert replied == [False] * 7


async def test_the_limit_rises_again(autojump_clock: MockClock) -> None:
    store = Store()
    meta = store.put("a", bytes(SIZE))
    origin = ResilientOrigin(store, Resilience(max_downloads=4))
    for _ in range(9):
        store.fail_next(1, OriginBusyError("busy"))
        await origin.read("a", meta, 0, SIZE)
    assert (before := origin.state()["limit"]) < 3
    for _ in range(10):
        while begin(origin, meta):
            pass
        while store.ends:
            store.end()
    assert origin.state()["limit"] > before


async def test_a_slow_store_is_left_to_tasks(autojump_clock: MockClock) -> None:
    """A read without a task has little time. What takes longer would be sent twice."""
    store = Store()
    meta = store.put("a", bytes(SIZE))
    origin = ResilientOrigin(store, Resilience())
    assert begin(origin, meta)
    store.ends.pop()(None)
    store.delay_s = 2.0
    await origin.read("a", meta, 0, SIZE)
    assert not begin(origin, meta)
    store.delay_s = 0.1
    await origin.read("a", meta, 0, SIZE)
    assert begin(origin, meta)
    store.end()
    assert origin.state()["in_flight"] == 0


async def test_a_store_that_is_silent_for_a_while_costs_no_error(autojump_clock: MockClock) -> None:
    """The time of the first try counts, and the next one has what is left."""
    store = Store()
    ref = put(store, "a", SIZE)
    origin = ResilientOrigin(store, Resilience())
    patience_s = 0.95 * Resilience().read_timeout_s
    async with serving(origin, patience_s=patience_s) as cache:  # type: ignore[arg-type]
        for latency_s, is_right in ((3.3, True), (20, False)):
            store.delay_s = 0.0
            await origin.read("a", ref.meta, 0, SIZE)
            store.delay_s = latency_s
            began_at = trio.current_time()
            assert cache.reply(ref, Reply(-1, 12, 0, SIZE), lambda is_replied: None)
            await trio.sleep(QUICK_READ_S)
            store.ends.pop()(None)
            if is_right:
                assert await read_whole(cache, ref) == store.expected("a")
            else:
                with pytest.raises(OriginUnavailableError, match="no answer within"):
                    await read_whole(cache, ref)
            assert trio.current_time() < began_at + patience_s


@pytest.mark.expect_log("answers again")
@pytest.mark.expect_log("does not answer; what is not cached fails at once")
async def test_what_began_before_an_outage_waits_for_its_end(autojump_clock: MockClock) -> None:
    """As any other read that was in flight."""
    store = Store()
    meta = store.put("a", bytes(SIZE))
    origin = ResilientOrigin(store, Resilience())
    async with trio.open_nursery() as nursery:
        await nursery.start(origin.run)
        store.fail_next(1000, OriginUnavailableError("gone"))
        while not origin.is_down:
            with pytest.raises(OriginUnavailableError):
                await origin.read("a", meta, 0, SIZE)
        began_at = trio.current_time()
        nursery.start_soon(heal_after, 1.0, store)
        turn = Turn(Priority.READER, began_at=trio.current_time() - 0.5)
        assert await origin.read_in_turn(turn, "a", meta, 0, SIZE) == bytes(SIZE)
        assert trio.current_time() > began_at + 1.0
        nursery.cancel_scope.cancel()


async def heal_after(pause_s: float, store: Store) -> None:
    await trio.sleep(pause_s)
    store.heal()


async def test_a_short_patience_leaves_time_for_tasks_only(autojump_clock: MockClock) -> None:
    store = Store()
    meta = store.put("a", bytes(SIZE))
    assert not begin(ResilientOrigin(store, Resilience(read_timeout_s=2.0)), meta)
    assert begin(ResilientOrigin(store, Resilience(4.0, 2.0)), meta)


async def test_bytes_and_failures_reach_readers_that_joined(tmp_path: Path) -> None:
    store = Store()
    ref = put(store, "a", SIZE)
    replied: list[bool] = []
    got: list[Buffer] = []
    async with serving(store, open_tier(tmp_path)) as cache:
        assert cache.reply(ref, Reply(-1, 12, 0, SIZE), replied.append)

        async def read() -> None:
            got.append(await read_whole(cache, ref))

        store.fail_next(1, OriginUnavailableError("gone"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, read)
            await wait_all_tasks_blocked()
            store.ends.pop()(None)
        assert cache.reply(ref, Reply(-1, 13, 0, SIZE), replied.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            store.end()
    assert replied == [False, True]
    assert got == [store.expected("a")]
    assert cache.held_bytes == cache.fetching_count == cache.waiting_readers == 0


class Held(Store):
    """Its tasks wait for `released`, except for blocks from `free_from` on."""

    def __init__(self) -> None:
        super().__init__()
        self.ref = put(self, "a", 4 * MIB + 500)
        self.released = trio.Event()
        self.free_from = 9
        self.on_read = self._hold

    async def _hold(self, path: str, offset: int, length: int) -> None:
        if offset < self.free_from * MIB:
            await self.released.wait()


ACROSS = Reply(-1, 12, MIB + 1000, MIB)


@pytest.mark.parametrize("second", ["coming", "in memory", "stored"])
async def test_a_read_of_two_blocks_that_come_is_answered_once(tmp_path: Path, second: str) -> None:
    store = Held()
    store.free_from = 9 if second == "coming" else 2
    replied: list[bool] = []
    async with serving(store, open_tier(tmp_path)) as cache:
        cache.fetch(store.ref, 1, 1)
        cache.fetch(store.ref, 2, 2)
        if second != "coming":
            await until(lambda: not cache.is_in_flight(key_of(store.ref, 2)))
        if second == "stored":
            await cache.drain()
        assert cache.reply(store.ref, ACROSS, replied.append) == "wait"
        assert cache.reply(store.ref, Reply(-1, 13, MIB, 500), replied.append) == "wait"
        await wait_all_tasks_blocked(0.01)
        assert (replied, cache.waiting_readers) == ([], 2)
        store.released.set()
        await until(lambda: len(replied) == 2)
        assert replied == [True, True]
        whole = store.expected("a")
        assert sorted(store.sent) == sorted([whole[MIB + 1000 :][:MIB], whole[MIB:][:500]])
        assert cache.waiting_readers == 0
        assert cache.reply(store.ref, ACROSS, replied.append) == "hit"
        assert store.sent[2] == whole[MIB + 1000 :][:MIB]
    assert store.counters.gets == 2


async def test_the_end_of_a_file_is_answered_as_it_comes(tmp_path: Path) -> None:
    store = Held()
    replied: list[bool] = []
    async with serving(store, open_tier(tmp_path)) as cache:
        cache.fetch(store.ref, 3, 2)
        assert cache.reply(store.ref, Reply(-1, 12, 4 * MIB - 9, 509), replied.append) == "wait"
        store.released.set()
        await until(lambda: replied)
    assert store.sent == [store.expected("a")[4 * MIB - 9 :]]


async def test_a_read_whose_bytes_do_not_come_is_given_back(autojump_clock: MockClock) -> None:
    """Then the usual way tells why."""
    store = Held()
    replied: list[bool] = []
    async with serving(store, patience_s=5.0) as cache:
        cache.fetch(store.ref, 1, 1)
        cache.fetch(store.ref, 2, 1)
        assert cache.reply(store.ref, ACROSS, replied.append) == "wait"
        await trio.sleep(4)
        assert replied == []
        await trio.sleep(2)
        assert replied == [False]
        with pytest.raises(OriginUnavailableError, match="nothing has come"):
            await cache.read_block(store.ref, 1, 0, 1)
        store.fail_next(9, OriginUnavailableError("gone"))
        cache.fetch(store.ref, 0, 1)
        assert cache.reply(store.ref, Reply(-1, 14, 0, 500), replied.append) == "wait"
        await trio.sleep(1)
        assert replied == [False, False]
        assert cache.reply(store.ref, ACROSS, replied.append) == "wait"
    assert replied == [False] * 3
    assert store.sent == []


async def test_what_no_request_brings_is_left_to_tasks(tmp_path: Path) -> None:
    store = Held()
    store.sends = False
    async with serving(store, open_tier(tmp_path)) as cache:
        cache.fetch(store.ref, 1, 1)
        assert cache.reply(store.ref, ACROSS, lambda is_replied: None) is None
        store.sends = True
        assert cache.reply(store.ref, ACROSS, lambda is_replied: None) is None
        assert cache.reply(store.ref, Reply(-1, 12, 5, 3 * MIB), lambda is_replied: None) is None
        assert cache.waiting_readers == 0
        store.released.set()


async def fails(read: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(OriginUnavailableError, match="gone"):
        await read()
