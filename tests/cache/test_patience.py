"""How long a reader waits for an origin that sends nothing."""

from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.fetch import fetches
from cachefs.errors import OriginUnavailableError
from cachefs.types import ObjectRef
from tests.cache.harness import MIB, assert_right, open_tier, put, put_many, read_whole, serving
from tests.memory_origin import MemoryOrigin

PATIENCE_S = 2.0


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A slow clock, so that a busy machine doesn't use the patience up between two steps."""
    return trio.testing.MockClock(rate=0.05)


async def let_pass(clock: trio.testing.MockClock, duration_s: float) -> None:
    """Let so much time pass at once for all who wait."""
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(duration_s)
    await trio.testing.wait_all_tasks_blocked()


class Gate(MemoryOrigin):
    """Answers one read, whichever, for each `let_through`."""

    def __init__(self) -> None:
        super().__init__()
        self._tickets = trio.Semaphore(0)
        self.on_read = self._wait

    async def _wait(self, path: str, offset: int, length: int) -> None:
        await self._tickets.acquire()

    def let_through(self, count: int = 1) -> None:
        for _ in range(count):
            self._tickets.release()


async def fails(cache: BlockCache, ref: ObjectRef) -> float:
    """After how many seconds."""
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError):
        await read_whole(cache, ref)
    return trio.current_time() - began_at


async def test_a_reader_has_its_error_and_the_flight_goes_on(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    origin = Gate()
    ref = put(origin, "a", 5000)
    async with serving(origin, open_tier(tmp_path), patience_s=PATIENCE_S) as cache:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_pass, clock, PATIENCE_S)
            assert await fails(cache, ref) >= PATIENCE_S
        # The kernel asks again for the same page: that reader has waited enough.
        assert await fails(cache, ref) < PATIENCE_S
        origin.let_through()
        await trio.testing.wait_all_tasks_blocked(0.005)
        assert await read_whole(cache, ref) == origin.expected("a")
    assert origin.counters.gets == 1


async def test_readers_wait_as_long_as_something_comes(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    origin = Gate()
    refs = put_many(origin, 20, 5000)
    async with serving(origin, open_tier(tmp_path), patience_s=PATIENCE_S) as cache:
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for ref in refs:
                nursery.start_soon(read_whole, cache, ref)
            for _ in refs:
                await let_pass(clock, PATIENCE_S / 8)
                origin.let_through()
        assert trio.current_time() - began_at > 2 * PATIENCE_S


async def test_what_waits_for_memory_has_its_error_too(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    origin = Gate()
    first, second = put_many(origin, 2, MIB)
    options = {"patience_s": PATIENCE_S, "buffer_bytes": MIB}
    async with serving(origin, open_tier(tmp_path), **options) as cache:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, cache, first)
            nursery.start_soon(fails, cache, second)
            nursery.start_soon(let_pass, clock, PATIENCE_S)
        assert origin.counters.gets == 1
        origin.let_through(2)


async def test_a_limit_on_purpose_makes_nobody_impatient(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    origin = Gate()
    ref = put(origin, "a", 5000)
    async with (
        serving(origin, open_tier(tmp_path), patience_s=PATIENCE_S) as cache,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(assert_right, cache, origin, [ref])
        for _ in range(12):
            await let_pass(clock, PATIENCE_S / 8)
            origin.held_back_at = trio.current_time()
        origin.let_through()
    assert origin.counters.gets == 1


async def test_a_block_sought_long_in_vain_is_not_sought_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "_FAILURE_S", 1000.0)
    origin = MemoryOrigin(delay_s=0.6)
    ref = put(origin, "a", 5000)
    origin.fail_next(1, OriginUnavailableError("gone"))
    async with serving(origin, open_tier(tmp_path)) as cache:
        assert await fails(cache, ref) >= 0.6
        await fails(cache, ref)
        assert origin.counters.gets == 1
        monkeypatch.setattr(fetches, "_FAILURE_S", 0.0)
        assert await read_whole(cache, ref) == origin.expected("a")
