"""The queues before the origin: readers go first, and a limit holds."""

import random

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from cachefs.cache.fetch.in_flight import FetchMemory
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.origin.resilience.bandwidth import Bandwidth
from cachefs.origin.resilience.limiter import AdaptiveLimit, RequestSlots
from cachefs.types import READER_TURN, Priority, Turn
from tests.memory_origin import MemoryOrigin

MIB = 1 << 20
RATE = 2 * MIB
READER, AHEAD, LOAD = Priority.READER, Priority.READ_AHEAD, Priority.LOAD


class Queue:
    """A `Bandwidth`, and what it gave: (second, bytes, name)."""

    def __init__(self, rate: float = RATE) -> None:
        self.waits = 0
        self.bandwidth = Bandwidth(rate, self._note_wait)
        self.given: list[tuple[float, int, str]] = []

    def _note_wait(self) -> None:
        self.waits += 1

    async def take(self, size_bytes: int, turn: Turn, name: str = "") -> None:
        await self.bandwidth.take(size_bytes, turn)
        self.given.append((trio.current_time(), size_bytes, name))

    async def take_again(
        self, size_bytes: int, priority: Priority, name: str, until: float
    ) -> None:
        while trio.current_time() < until:
            await self.take(size_bytes, Turn(priority), name)

    def given_bytes(self, name: str) -> int:
        return sum(size_bytes for _, size_bytes, given in self.given if given == name)

    def given_at(self, name: str) -> float:
        return next(at for at, _, given in self.given if given == name)


async def test_a_reader_does_not_wait_for_a_load(autojump_clock: MockClock) -> None:
    queue = Queue()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(queue.take, MIB, Turn(LOAD), "load")
        await trio.sleep(3.3)
        for number in range(100):  # each comes when the one before it was served
            began_at = trio.current_time()
            await queue.take(10_000, READER_TURN, "reader")
            assert trio.current_time() - began_at < 0.02, number
    assert trio.current_time() == pytest.approx(10 + MIB / RATE, rel=0.1), "nothing was lost"


async def test_a_load_gets_what_readers_leave(autojump_clock: MockClock) -> None:
    queue = Queue()

    async def read() -> None:
        for _ in range(100):
            await queue.take(10_000, READER_TURN, "reader")
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.take_again, MIB, LOAD, "load", 10.0)
        nursery.start_soon(queue.take_again, 50_000, AHEAD, "ahead", 5.0)
        nursery.start_soon(read)
    assert queue.given_bytes("reader") == 1_000_000
    assert queue.given_bytes("ahead") == pytest.approx(5 * RATE - 500_000, rel=0.1)
    assert queue.given_bytes("load") == pytest.approx(5 * RATE - 500_000, rel=0.15)


async def test_readers_have_equal_shares(autojump_clock: MockClock) -> None:
    queue = Queue()
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(queue.take_again, 20_000, READER, "small", 60.0)
        nursery.start_soon(queue.take_again, MIB, READER, "large", 60.0)
    assert queue.given_bytes("small") == pytest.approx(60 * RATE * 6 / 7, rel=0.1)
    assert queue.given_bytes("large") == pytest.approx(60 * RATE / 7, rel=0.2)


async def test_a_request_that_a_reader_joins_overtakes(autojump_clock: MockClock) -> None:
    queue = Queue()
    turns = {name: Turn(LOAD) for name in "abcd"}
    async with trio.open_nursery() as nursery:
        for name, turn in turns.items():
            nursery.start_soon(queue.take, 4 * MIB, turn, name)
            await trio.sleep(0.25)
        turns["c"].priority = READER
        queue.bandwidth.reorder()
        await trio.sleep(0.05)
        assert [name for _, _, name in queue.given] == ["c"]
    assert [name for _, _, name in queue.given] == ["c", "a", "b", "d"]
    assert trio.current_time() == pytest.approx(8.0, abs=0.1), "what was paid already counts"


@pytest.mark.parametrize("priority", Priority)
async def test_a_cancelled_wait_takes_nothing_and_wakes_the_next(
    priority: Priority, autojump_clock: MockClock
) -> None:
    queue = Queue()
    await queue.take(RATE, READER_TURN)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(1.5 if priority is not READER else 0.5) as scope:
            nursery.start_soon(queue.take, RATE // 10, Turn(LOAD))
            await queue.take(100 * RATE, Turn(priority))
        assert scope.cancelled_caught
    assert trio.current_time() < 1.7, "the next one went on at once"
    began_at = trio.current_time()
    await queue.take(1, READER_TURN)
    assert trio.current_time() < began_at + 0.1


async def test_a_limit_is_changed_while_requests_wait(autojump_clock: MockClock) -> None:
    queue = Queue()
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(queue.take, 10 * RATE, Turn(Priority(number % 3)), "")
        await trio.sleep(1)
        queue.bandwidth.set_rate(100 * RATE)
        await trio.sleep(0.5)
        queue.bandwidth.set_rate(None)
        await trio.sleep(0.001)
        assert len(queue.given) == 10
    began_at = trio.current_time()
    await queue.take(10 * RATE, Turn(LOAD))
    assert trio.current_time() == began_at
    assert queue.waits


async def test_what_is_given_back_is_used_at_once(autojump_clock: MockClock) -> None:
    queue = Queue()
    await queue.take(10 * RATE, READER_TURN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.take, 1, READER_TURN)
        await trio.sleep(0.5)
        queue.bandwidth.give_back(10 * RATE)
        await trio.sleep(0.01)
        assert len(queue.given) == 2


@pytest.mark.parametrize("seed", range(20))
async def test_any_mix_keeps_the_limit(seed: int, autojump_clock: MockClock) -> None:
    """Requests of all kinds come, are joined and cancelled. Over any two seconds the limit holds,
    and while requests wait, nothing of it is lost."""
    rng = random.Random(seed)
    queue = Queue()
    turns: list[Turn] = []
    ended_at = 0.0

    async def one() -> None:
        nonlocal ended_at
        await trio.sleep(rng.uniform(0, 10))
        turn = Turn(rng.choice(list(Priority)))
        turns.append(turn)
        with trio.move_on_after(rng.uniform(0.1, 5) if rng.random() < 0.2 else 1000):
            await queue.take(rng.randrange(1, RATE // 20), turn)
            ended_at = trio.current_time()

    async def join() -> None:
        for _ in range(50):
            await trio.sleep(0.2)
            if turns:
                rng.choice(turns).priority = READER
                queue.bandwidth.reorder()

    async with trio.open_nursery() as nursery:
        for _ in range(600):
            nursery.start_soon(one)
        nursery.start_soon(join)
    total_bytes = sum(size_bytes for _, size_bytes, _ in queue.given)
    for start in (number / 4 for number in range(int(4 * ended_at))):
        window_bytes = sum(size for at, size, _ in queue.given if start <= at < start + 2)
        assert window_bytes <= 1.1 * 2 * RATE
    assert total_bytes >= 0.9 * RATE * (ended_at - 0.5), "it was busy all the time"


# The other queues


async def test_slots_go_to_readers_first() -> None:
    slots = RequestSlots(AdaptiveLimit(1))
    assert slots.try_take()
    turn = Turn(LOAD)
    load, joined, ahead = slots.ask(Turn(LOAD)), slots.ask(turn), slots.ask(Turn(AHEAD))
    reader = slots.ask()
    turn.priority = READER
    slots.reorder()
    for granted in (reader, joined, ahead, load):
        assert not granted.is_set()
        slots.release()
        assert granted.is_set()
    assert slots.queued == 0
    await trio.lowlevel.checkpoint()


async def test_memory_goes_to_readers_first(autojump_clock: MockClock) -> None:
    memory = FetchMemory(100)
    got: list[str] = []

    async def reserve(size_bytes: int, turn: Turn, name: str) -> None:
        await memory.reserve(size_bytes, turn)
        got.append(name)

    await memory.reserve(70, Turn(LOAD))
    assert memory.try_reserve(5, Turn(AHEAD))
    assert not memory.try_reserve(1, Turn(AHEAD)), "the last quarter is for readers"
    assert memory.try_reserve(25)
    turn = Turn(LOAD)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reserve, 20, Turn(LOAD), "load")
        await trio.sleep(1)
        nursery.start_soon(reserve, 20, turn, "joined")
        await trio.sleep(1)
        nursery.start_soon(reserve, 20, READER_TURN, "reader")
        await trio.sleep(1)
        memory.release(20)
        await trio.sleep(1)
        assert got == ["reader"]
        memory.release(20)
        await trio.sleep(1)
        assert got == ["reader"], "20 of the last 25 bytes are for readers"
        turn.priority = READER
        memory.reorder()
        await trio.sleep(1)
        assert got == ["reader", "joined"]
        memory.release(60)
    assert got == ["reader", "joined", "load"]


async def test_a_request_for_more_than_the_background_may_have(autojump_clock: MockClock) -> None:
    memory = FetchMemory(100)
    await memory.reserve(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.reserve, 200, Turn(LOAD))
        await trio.sleep(1)
        assert memory.used_bytes == 1
        memory.release(1)
    assert memory.used_bytes == 100


@pytest.mark.parametrize("turn", [Turn(AHEAD), Turn(LOAD)])
async def test_readers_of_an_origin_overtake(turn: Turn, autojump_clock: MockClock) -> None:
    store = MemoryOrigin()
    large, small = store.put_generated("large", 64 * MIB), store.put("small", bytes(10_000))
    origin = ResilientOrigin(store, Resilience(download_limit=RATE, max_downloads=2))
    assert origin.best_read_bytes == RATE / 4

    async def in_background() -> None:
        await origin.read_in_turn(turn, "large", large, 0, 8 * MIB)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(in_background)
        await trio.sleep(1)
        began_at = trio.current_time()
        for _ in range(50):
            await origin.read("small", small, 0, 10_000)
        assert trio.current_time() - began_at < 1
        origin.download_limit = None
    assert origin.best_read_bytes > 64 * MIB
