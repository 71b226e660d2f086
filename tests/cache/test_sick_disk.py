"""Disks that fail, dawdle or hang: no read fails, nobody waits for long, and they come back."""

import errno
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.counters import TierStatus
from cachefs.cache.levels import active_tier
from cachefs.cache.tier import admission, evictor
from cachefs.cache.tier import disk_threads as tier_io
from cachefs.cache_dir import health
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.types import Medium, ObjectRef
from tests.cache.faulty_disk import FaultyDisk
from tests.cache.harness import (
    MIB,
    PATIENCE_S,
    assert_kept,
    assert_right,
    key_of,
    put_many,
    read_whole,
    recount,
    serving,
    stores,
    until,
)
from tests.disk_limits import set_disk_limits
from tests.memory_origin import MemoryOrigin

pytestmark = [pytest.mark.real_disk_limits, pytest.mark.long]

SICK = "the disk is (unstable|down)|can't store blocks|can't grow|read failed|does not answer"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health judged up to ten times as fast, so that nothing here waits for long."""
    set_disk_limits(monkeypatch, patience_s=0.15, hung_s=1.0, most_patience_s=0.2)
    monkeypatch.setattr(health, "_PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(health, "_MAX_PROBE_EVERY_S", 0.2)
    monkeypatch.setattr(health, "_PROBE_DOWN_EVERY_S", 0.2)
    monkeypatch.setattr(tier_io, "_WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(admission, "_FAILURE_PAUSE_S", 0.1)
    monkeypatch.setattr(evictor, "CHECK_INTERVAL_S", 0.1)


@pytest.fixture(params=[True, False])
def noticed(
    request: pytest.FixtureRequest,
    fast: None,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[..., None],
) -> bool:
    """Whether the health rules see the disk hang. If not, its reads are still given up early."""
    if request.param:
        expect_log("the disk is")
    else:
        set_disk_limits(monkeypatch, patience_s=0.1, hung_s=1000.0, most_patience_s=0.2)
    return request.param


def tier(path: Path, disk: FaultyDisk | None = None, medium: Medium = Medium.SSD) -> CacheDirectory:
    identity = MemoryOrigin().identity
    return CacheDirectory.open(
        path, 64 * MIB, identity, free_space_ratio=0.0, medium=medium, disk=disk
    )


def lay_out(layout: str, root: Path, disk: FaultyDisk) -> list[CacheDirectory]:
    """Cache directories, that of the sick disk being `root/sick`."""
    sick = root / "sick"
    if layout == "only":
        return [tier(sick, disk)]
    if layout == "MEM above":
        return [tier(sick, disk, Medium.MEM), tier(root / "good")]
    return [tier(sick, disk), tier(root / "good")]


LAYOUTS = ["only", "one of two", "MEM above"]


def sick_one(cache: BlockCache) -> TierStatus:
    return next(status for status in cache.status() if status.path.endswith("sick"))


def blocks_on_sick(cache: BlockCache, refs: list[ObjectRef]) -> list[ObjectRef]:
    store = next(store for store in stores(cache) if store.directory.paths.root.name == "sick")
    return [ref for ref in refs if store.index.find(key_of(ref)) is not None]


async def settled(cache: BlockCache) -> None:
    await cache.drain()
    await until(lambda: cache.held_bytes == 0)


FAULTS: dict[str, Callable[[FaultyDisk], None]] = {
    "errors on reads": lambda disk: disk.fail(errno.EIO, "read"),
    "errors on writes": lambda disk: disk.fail(errno.EIO, "write", "create"),
    "read-only": lambda disk: disk.fail(errno.EROFS, "write", "create", "sync", "unlink"),
    "reads hang": lambda disk: disk.hang("read"),
    "all hangs": lambda disk: disk.hang(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_reads_go_on_and_the_disk_comes_back(
    layout: str,
    fault: str,
    tmp_path: Path,
    disk: FaultyDisk,
    fast: None,
    expect_log: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    origin: MemoryOrigin,
) -> None:
    expect_log(SICK)
    refs = put_many(origin, 60, 100_000)
    more = iter(put_many(origin, 3000, 20_000, "more"))
    async with serving(origin, *lay_out(layout, tmp_path, disk)) as cache:
        await assert_right(cache, origin, refs)
        await settled(cache)
        disk.cold = True
        FAULTS[fault](disk)
        with trio.fail_after(PATIENCE_S):
            while sick_one(cache).health == "normal":
                await assert_right(cache, origin, [*refs[:10], *itertools.islice(more, 3)])
                await trio.sleep(0.01)

        # Out of use: not read, nothing new stored, everything served.
        async def is_left_alone() -> bool:
            counters = sick_one(cache).counters
            hits, admitted = counters.hits, counters.admitted
            new = list(itertools.islice(more, 30))
            await assert_right(cache, origin, [*refs, *new])
            assert sick_one(cache).health != "normal"
            return (counters.hits, counters.admitted) == (hits, admitted)

        with trio.fail_after(PATIENCE_S):
            # What was under way still comes in.
            while not await is_left_alone():  # noqa: ASYNC110 - as `until`
                await trio.sleep(0.01)
        if layout != "only":
            await settled(cache)
            await assert_kept(cache, origin, refs)
        else:
            await until(lambda: cache.held_bytes == 0)

        disk.heal()
        await until(lambda: sick_one(cache).health == "normal")
        disk.cold = True
        back = blocks_on_sick(cache, refs)
        assert len(back) >= 10
        await assert_kept(cache, origin, back)
        await settled(cache)
        recount(cache)
    # It falls again only where a busy machine makes a healthy disk look sick.
    assert sum("the disk is unstable" in record.message for record in caplog.records) <= 2
    assert caplog.records[0].levelno >= logging.WARNING


@pytest.mark.parametrize("layout", ["only", "one of two"])
async def test_two_seconds_for_everything(
    layout: str,
    tmp_path: Path,
    disk: FaultyDisk,
    expect_log: Callable[..., None],
    origin: MemoryOrigin,
) -> None:
    """With the real limits: the disk is out of use after a few seconds of this."""
    expect_log("the disk is unstable")
    refs = put_many(origin, 30, 100_000)
    async with serving(origin, *lay_out(layout, tmp_path, disk)) as cache:
        await assert_right(cache, origin, refs)
        await settled(cache)
        disk.cold = True
        disk.delay(2.0)

        async def reader(refs: list[ObjectRef]) -> None:
            while sick_one(cache).health == "normal":
                await assert_right(cache, origin, refs)
                await trio.sleep(0.01)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(reader, refs[number::3])
        await assert_right(cache, origin, refs)
        disk.heal()


async def test_a_busy_disk_is_not_sick(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 48, 50_000)
    async with serving(origin, tier(tmp_path, disk)) as cache:
        await assert_right(cache, origin, refs)
        await settled(cache)
        disk.cold = True
        disk.delay(0.2, "read", "write", "create")
        gets = origin.counters.gets

        async def reader(refs: list[ObjectRef]) -> None:
            await assert_right(cache, origin, refs)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(reader, refs[number::4])
            nursery.start_soon(reader, put_many(origin, 20, 50_000, "new"))
        assert cache.status()[0].health == "normal"
        assert origin.counters.gets < gets + 20 + 24, "most of them come from the disk"
        disk.heal()


async def test_a_full_disk_is_not_sick(
    tmp_path: Path,
    disk: FaultyDisk,
    expect_log: Callable[..., None],
    fast: None,
    origin: MemoryOrigin,
) -> None:
    expect_log("can't store blocks|can't grow")
    refs = put_many(origin, 100, 100_000)
    async with serving(origin, tier(tmp_path, disk)) as cache:
        await assert_right(cache, origin, refs[:30])
        await settled(cache)
        disk.fail(errno.ENOSPC, "write", "create")
        await assert_kept(cache, origin, refs[:30])
        for _ in range(3):
            await assert_right(cache, origin, refs)
            await settled(cache)
        assert cache.status()[0].health == "normal"
        recount(cache)
        disk.heal()

        async def all_stored() -> bool:
            await assert_right(cache, origin, refs)
            await cache.drain()
            return cache.status()[0].cached_blocks == 100

        with trio.fail_after(PATIENCE_S):
            while not await all_stored():  # noqa: ASYNC110 - as `until`
                await trio.sleep(0.05)


async def test_nobody_waits_for_another_path(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """All threads of one path hang, and nobody has noticed yet."""
    set_disk_limits(monkeypatch, patience_s=1000.0, hung_s=1000.0, most_patience_s=2000.0)
    good = FaultyDisk()
    refs = put_many(origin, 60, 100_000)
    async with serving(origin, tier(tmp_path / "sick", disk), tier(tmp_path / "b", good)) as cache:
        await assert_right(cache, origin, refs)
        await settled(cache)
        slow = blocks_on_sick(cache, refs)
        quick = [ref for ref in refs if ref not in slow]
        disk.cold = good.cold = True
        disk.hang()
        gets = origin.counters.gets
        done: list[bytes] = []

        async def reader(ref: ObjectRef) -> None:
            done.append(await read_whole(cache, ref))

        async with trio.open_nursery() as nursery:
            for ref in slow[:8]:
                nursery.start_soon(reader, ref)
            await until(lambda: disk.hanging >= 4)
            with trio.fail_after(PATIENCE_S):
                for _ in range(3):
                    await assert_right(cache, origin, quick)
            assert not done
            assert disk.hanging == 4
            disk.heal()
        assert origin.counters.gets == gets
        assert len(done) == 8


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_cold_reads_go_on_while_writes_hang(
    layout: str,
    noticed: bool,
    tmp_path: Path,
    disk: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    origin: MemoryOrigin,
) -> None:
    """Many times the memory for blocks under way is read; a hung writer must not hold it all.
    Neither when the health rules see the disk hang, nor before they do."""
    monkeypatch.setattr(admission, "STALL_S", 0.3)
    refs = put_many(origin, 24, 4 * MIB)
    tiers = lay_out(layout, tmp_path, disk)
    async with serving(origin, *tiers, buffer_bytes=16 * MIB) as cache:
        disk.hang("write", "create")

        async def reader(refs: list[ObjectRef]) -> None:
            await assert_right(cache, origin, refs)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(reader, refs[number::6])
        assert disk.hanging
        if noticed:
            await until(lambda: sick_one(cache).health != "normal")
        await until(lambda: cache.held_bytes == 0)
        assert cache.storing_count == 0
        disk.heal()
        if noticed:
            await until(lambda: sick_one(cache).health == "normal")

        # Of new blocks: some of the old ones may have found a home elsewhere meanwhile.
        async def takes_blocks_again() -> bool:
            fresh = put_many(origin, 8, MIB, f"fresh{next(attempts)}-")
            await assert_right(cache, origin, fresh)
            await settled(cache)
            return len(blocks_on_sick(cache, fresh)) > 0

        attempts = itertools.count()
        with trio.fail_after(PATIENCE_S):
            while not await takes_blocks_again():  # noqa: ASYNC110 - as `until`
                await trio.sleep(0.05)
        recount(cache)


async def test_a_hung_disk_below_does_not_stop_the_one_above(
    noticed: bool,
    tmp_path: Path,
    disk: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    origin: MemoryOrigin,
) -> None:
    monkeypatch.setattr(admission, "STALL_S", 0.3)
    identity = origin.identity
    above = CacheDirectory.open(
        tmp_path / "m", 12 * MIB, identity, free_space_ratio=0.0, medium=Medium.MEM
    )
    async with serving(
        origin, above, tier(tmp_path / "sick", disk), buffer_bytes=16 * MIB
    ) as cache:
        disk.hang("write", "create")
        refs = put_many(origin, 400, 100_000)
        with trio.fail_after(PATIENCE_S):
            for ref in refs:
                await assert_right(cache, origin, [ref])
        if noticed:
            await until(lambda: sick_one(cache).health != "normal")
        await until(lambda: cache.held_bytes == 0)

        # The faster tier goes on taking blocks, without a place to move the others to.
        async def newest_stored() -> bool:
            fresh = put_many(origin, 60, 100_000, "new")
            await assert_right(cache, origin, fresh)
            await cache.drain()
            store = stores(cache)[0]
            return all(store.index.find(key_of(ref)) is not None for ref in fresh[-5:])

        with trio.fail_after(PATIENCE_S):
            while not await newest_stored():  # noqa: ASYNC110 - as `until`
                await trio.sleep(0.1)
        disk.heal()


@pytest.mark.parametrize("fault", ["reads hang", "writes hang", "all hangs"])
async def test_closing_with_a_hanging_disk_ends(
    fault: str,
    noticed: bool,
    tmp_path: Path,
    disk: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[..., None],
    origin: MemoryOrigin,
) -> None:
    expect_log("does not answer")
    monkeypatch.setattr(active_tier, "CLOSE_TIMEOUT_S", 0.3)
    refs = put_many(origin, 20, 100_000)
    good, path = tier(tmp_path / "good"), tmp_path / "sick"
    async with serving(origin, tier(path, disk), good) as cache:
        await assert_right(cache, origin, refs)
        await settled(cache)
        disk.cold = True
        if fault == "all hangs":
            disk.hang()
        else:
            disk.hang("read") if fault == "reads hang" else disk.hang("write", "create")

        async def reader(ref: ObjectRef) -> None:
            await assert_right(cache, origin, [ref])

        async with trio.open_nursery() as nursery:
            for ref in [*refs, *put_many(origin, 20, 100_000, "new")]:
                nursery.start_soon(reader, ref)
            await until(lambda: disk.hanging)
            if noticed:
                await until(lambda: sick_one(cache).health != "normal")
        with trio.fail_after(PATIENCE_S):
            await cache.aclose(drain_s=0.2)
    disk.heal()
    # The healthy directory was closed in order and can be opened again.
    async with serving(origin, tier(tmp_path / "good")) as cache:
        status = cache.status()[0]
        assert status.cached_blocks > 5
        assert not stores(cache)[0].files.must_reconcile


async def test_a_hanging_disk_can_be_taken_out_of_use(
    tmp_path: Path,
    disk: FaultyDisk,
    fast: None,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[..., None],
    origin: MemoryOrigin,
) -> None:
    expect_log("does not answer")
    expect_log("the disk is")
    monkeypatch.setattr(active_tier, "CLOSE_TIMEOUT_S", 0.3)
    refs = put_many(origin, 20, 100_000)
    async with serving(origin, *lay_out("one of two", tmp_path, disk)) as cache:
        disk.hang()
        await assert_right(cache, origin, refs)
        await until(lambda: sick_one(cache).health != "normal")
        with trio.fail_after(PATIENCE_S):
            await cache.remove_tier(tmp_path / "sick")
        await assert_right(cache, origin, refs)
        await settled(cache)
        await assert_kept(cache, origin, refs)
        assert len(cache.status()) == 1
        disk.heal()


@pytest.mark.expect_log("the disk is unstable")
@pytest.mark.expect_log("read failed|can't be opened", required=False)
async def test_errors_on_a_start_lose_little(
    tmp_path: Path, disk: FaultyDisk, fast: None, origin: MemoryOrigin
) -> None:
    """Slabs that can't be opened while the disk is sick are not given up."""
    refs = put_many(origin, 200, 100_000)
    async with serving(origin, tier(tmp_path / "sick")) as cache:
        await assert_right(cache, origin, refs)
    files = sorted((tmp_path / "sick" / "slabs").iterdir())
    assert len(files) >= 4
    disk.fail(errno.EIO, "read", "open")
    async with serving(origin, tier(tmp_path / "sick", disk)) as cache:
        with trio.fail_after(PATIENCE_S):
            while sick_one(cache).health == "normal":
                await assert_right(cache, origin, refs)
        disk.heal()
        await until(lambda: sick_one(cache).health == "normal")
        assert sorted((tmp_path / "sick" / "slabs").iterdir()) == files
        back = blocks_on_sick(cache, refs)
        assert len(back) >= 190
        await assert_kept(cache, origin, back)
        recount(cache)


@pytest.mark.expect_log("the disk is unstable")
async def test_opening_slabs_on_a_hanging_disk_stops_no_reader(
    tmp_path: Path, disk: FaultyDisk, fast: None, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 100, 100_000)
    async with serving(origin, tier(tmp_path / "sick")) as cache:
        await assert_right(cache, origin, refs)
    disk.hang("open")
    async with serving(origin, tier(tmp_path / "sick", disk)) as cache:
        with trio.fail_after(PATIENCE_S):
            await assert_right(cache, origin, refs)
            while sick_one(cache).health == "normal":
                await assert_right(cache, origin, refs)
        disk.heal()
        await until(lambda: sick_one(cache).health == "normal")
        await assert_kept(cache, origin, refs)


async def test_a_bad_sector_costs_its_block(
    tmp_path: Path, disk: FaultyDisk, expect_log: Callable[..., None], origin: MemoryOrigin
) -> None:
    """One error among many good operations: the block is fetched again, the disk stays in use."""
    expect_log("read failed")
    refs = put_many(origin, 50, 100_000)
    async with serving(origin, tier(tmp_path, disk)) as cache:
        await assert_right(cache, origin, refs)
        await settled(cache)
        disk.cold = True
        disk.fail(errno.EIO, "read")
        await assert_right(cache, origin, refs[:1])
        disk.heal()
        disk.cold = True
        await settled(cache)
        assert cache.status()[0].health == "normal"
        await assert_kept(cache, origin, refs)
        assert cache.status()[0].counters.read_errors == 1
