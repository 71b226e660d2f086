"""Moves between tiers, each stopped on its way: nothing is lost, nobody waits, all is accounted.

A `FaultyDisk` holds the copy back. Blocks rest for ever unless a test says that they have rested,
so that no test depends on how fast it runs.
"""

import errno
import math
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.check.directory import check_directory
from cachefs.cache.counters import TierCounters
from cachefs.cache.levels import active_tier
from cachefs.cache.tier import admission, cooldown, evictor
from cachefs.cache.tier import store as store_module
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.directory import CacheDirectory, Watermarks
from cachefs.format.slab import SlotEntry
from cachefs.types import BlockKey, Medium, ObjectRef
from tests.cache.faulty_disk import FaultyDisk
from tests.cache.harness import (
    MIB,
    PATIENCE_S,
    assert_right,
    block_rows,
    key_of,
    moving,
    open_tier,
    put_many,
    recount,
    serving,
    stores,
    tiers_of,
    until,
)
from tests.memory_origin import MemoryOrigin

BLOCK = 100_000


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens because time has passed."""
    monkeypatch.setattr(cooldown, "COOLDOWN_S", 1e6)
    monkeypatch.setattr(evictor, "CHECK_INTERVAL_S", 0.05)


def mem(root: Path, disk: FaultyDisk | None = None) -> CacheDirectory:
    """Two slabs; a third goes down once there are more than 60 blocks."""
    options = {} if disk is None else {"disk": disk}
    return open_tier(root / "mem", 8 * MIB, medium=Medium.MEM, high=0.75, low=0.5, **options)


def ssd(root: Path, disk: FaultyDisk | None = None, quota_bytes: int = 32 * MIB) -> CacheDirectory:
    options = {} if disk is None else {"disk": disk}
    return open_tier(root / "ssd", quota_bytes, medium=Medium.SSD, **options)


def hdd(root: Path) -> CacheDirectory:
    return open_tier(root / "hdd", 64 * MIB, medium=Medium.HDD)


def store_of(cache: BlockCache, name: str) -> TierStore:
    return next(store for store in stores(cache) if store.directory.paths.root.name == name)


def counters(cache: BlockCache, name: str) -> TierCounters:
    return store_of(cache, name).counters


def held(cache: BlockCache, name: str, refs: list[ObjectRef]) -> list[ObjectRef]:
    store = store_of(cache, name)
    return [ref for ref in refs if store.index.find(key_of(ref)) is not None]


def have_rested(cache: BlockCache, refs: list[ObjectRef]) -> None:
    """A second has passed for these, and for no others."""
    resting = tiers_of(cache).common.cooldown
    keys = {key for store in stores(cache) for key, _ in block_rows(store)}
    others = {key for key in keys if key in resting}.difference(map(key_of, refs))
    resting.expire(math.inf)
    for key in others:
        resting.begin(key, time.monotonic())


async def fill(cache: BlockCache, origin: MemoryOrigin, count: int, name: str) -> list[ObjectRef]:
    refs = put_many(origin, count, BLOCK, name)
    await assert_right(cache, origin, refs)
    await cache.drain()
    return refs


async def overfill(cache: BlockCache, origin: MemoryOrigin) -> list[ObjectRef]:
    """MEM above its high mark, everything there, and the evictor about to see it."""
    refs = await fill(cache, origin, 64, "f")
    assert held(cache, "mem", refs) == refs
    have_rested(cache, refs)
    tiers_of(cache)[0].evictor.wake()
    return refs


def swept(cache: BlockCache) -> bool:
    """MEM is at its low mark, and nothing is on its way from there."""
    store = store_of(cache, "mem")
    if tiers_of(cache)[0].mover.moving:
        return False
    return store.slabs.used_charge_bytes <= store.directory.watermarks.low_bytes


def waiting(cache: BlockCache, number: int) -> int:
    """How many blocks of that tier wait for their promotion."""
    return len(tiers_of(cache)[number].promoter._queue)


def assert_each_once(cache: BlockCache, refs: list[ObjectRef]) -> None:
    places = [ref.path for store in stores(cache) for ref in held(cache, _name(store), refs)]
    assert sorted(places) == sorted(ref.path for ref in refs)


def _name(store: TierStore) -> str:
    return store.directory.paths.root.name


# -- down ----------------------------------------------------------------------------------------


async def test_demoted_rather_than_dropped(tmp_path: Path, origin: MemoryOrigin) -> None:
    async with serving(origin, mem(tmp_path), ssd(tmp_path)) as cache:
        refs = await overfill(cache, origin)
        await until(lambda: swept(cache))
        below = held(cache, "ssd", refs)
        assert counters(cache, "mem").demoted == len(below) > 10
        assert counters(cache, "mem").evicted == 0
        assert_each_once(cache, refs)
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == len(refs)
        recount(cache)


@pytest.mark.parametrize("why", ["errors", "stalls", "keeps what it has"])
@pytest.mark.expect_log("can't store blocks|can't grow|the disk is unstable", required=False)
async def test_what_one_tier_refuses_goes_on_to_the_next(
    why: str,
    tmp_path: Path,
    disk: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    origin: MemoryOrigin,
) -> None:
    middle = ssd(tmp_path, disk, 8 * MIB if why == "keeps what it has" else 32 * MIB)
    async with (
        serving(origin, middle, hdd(tmp_path)) as cache,
        trio.open_nursery() as nursery,
    ):
        older = await fill(cache, origin, 80 if why == "keeps what it has" else 3, "older")
        there = held(cache, "ssd", older)
        assert len(there) > 2
        await cache.add_tier(mem(tmp_path))
        if why == "errors":
            disk.fail(errno.EIO, "write", "create")
        elif why == "stalls":
            disk.hang("write", "create")
            # Of this tier only: the others wait for long if the machine is busy.
            await trio.testing.wait_all_tasks_blocked()
            monkeypatch.setattr(admission, "STALL_S", 0.2)
            nursery.start_soon(tiers_of(cache)[1].admission.watch)
        gets = origin.counters.gets
        refs = await overfill(cache, origin)
        await until(lambda: swept(cache))
        assert counters(cache, "ssd").rejected > 0  # it was asked, and refused
        assert len(held(cache, "hdd", refs)) == counters(cache, "mem").demoted > 10
        assert held(cache, "ssd", older) == there
        assert counters(cache, "mem").evicted == 0
        assert_each_once(cache, refs)
        disk.heal()
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == gets + len(refs)
        await cache.drain()
        recount(cache)
        nursery.cancel_scope.cancel()


@pytest.mark.expect_log("can't grow|can't store blocks")
async def test_what_all_refuse_is_dropped_and_counted(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    async with serving(origin, mem(tmp_path), ssd(tmp_path, disk)) as cache:
        disk.fail(errno.ENOSPC, "write", "create")
        refs = await overfill(cache, origin)
        await until(lambda: swept(cache))
        left = held(cache, "mem", refs)
        assert counters(cache, "mem").demoted == 0
        assert counters(cache, "mem").evicted == len(refs) - len(left) > 10
        assert counters(cache, "ssd").rejected > 0
        assert held(cache, "ssd", refs) == []
        recount(cache)
        disk.heal()
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == 2 * len(refs) - len(left)


async def test_a_bad_sector_stops_only_its_block(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    """One of many that are read together for a move can't be read."""
    async with serving(origin, mem(tmp_path, disk), ssd(tmp_path)) as cache:
        refs = await fill(cache, origin, 64, "f")
        slab, slot = _slot_of(store_of(cache, "mem"), refs[0])
        position = slab.layout.slot_offset(slot)
        plain = type(disk).read

        def read(fd: int, length: int, offset: int) -> bytes:
            if fd == slab.fd and offset == position:
                raise OSError(errno.EIO, "bad sector")
            return plain(disk, fd, length, offset)

        disk.read = read  # type: ignore[method-assign]
        have_rested(cache, refs)
        tiers_of(cache)[0].directory.watermarks = Watermarks(0, 0)
        tiers_of(cache)[0].evictor.wake()
        await until(lambda: swept(cache))
        mine = counters(cache, "mem")
        assert (mine.read_errors, mine.evicted) == (1, 1)
        assert mine.demoted == len(refs) - 1
        assert held(cache, "ssd", refs) == refs[1:]
        recount(cache)


async def test_what_was_just_copied_stays(tmp_path: Path, origin: MemoryOrigin) -> None:
    """However full the tier above its mark: only what has rested goes, and where it went it
    rests again."""
    async with serving(origin, mem(tmp_path), ssd(tmp_path)) as cache:
        refs = await fill(cache, origin, 64, "f")
        assert tiers_of(cache)[0].evictor.above_high()
        have_rested(cache, refs[:5])
        tiers_of(cache)[0].evictor.wake()
        await until(lambda: len(held(cache, "ssd", refs)) == 5)
        assert held(cache, "ssd", refs) == refs[:5]
        assert counters(cache, "mem").evicted == 0

        # Not up again at once either, however often they are read.
        for _ in range(3):
            await assert_right(cache, origin, refs)
            await cache.drain()
        assert counters(cache, "mem").promoted == 0
        admitted = sum(counters(cache, name).admitted for name in ("mem", "ssd"))
        assert admitted == len(refs) + 5
        assert origin.counters.gets == len(refs)


# -- up ------------------------------------------------------------------------------------------


async def below_only(
    cache: BlockCache, origin: MemoryOrigin, above: CacheDirectory, count: int = 3
) -> list[ObjectRef]:
    """Blocks in SSD, rested, under a MEM that has room."""
    refs = await fill(cache, origin, count, "f")
    await cache.add_tier(above)
    have_rested(cache, refs)
    assert held(cache, "ssd", refs) == refs
    return refs


async def test_promoted_on_hits(tmp_path: Path, origin: MemoryOrigin) -> None:
    async with serving(origin, ssd(tmp_path)) as cache:
        refs = await below_only(cache, origin, mem(tmp_path))
        await assert_right(cache, origin, refs)
        await until(lambda: counters(cache, "mem").promoted == 3)
        assert held(cache, "mem", refs) == refs
        assert_each_once(cache, refs)
        await assert_right(cache, origin, refs)
        assert counters(cache, "mem").hits == 3
        assert origin.counters.gets == 3
        recount(cache)


@pytest.mark.expect_log("a block is not what was stored")
async def test_a_stale_row_moves_nobodys_block(tmp_path: Path, origin: MemoryOrigin) -> None:
    """After a power cut two blocks may be said to be in one slot, whose bytes are both's."""
    async with serving(origin, ssd(tmp_path)) as cache:
        refs = await below_only(cache, origin, mem(tmp_path))
        index = store_of(cache, "ssd").index
        location = index.locate(key_of(refs[0]))
        assert location is not None
        stale = BlockKey(bytes(16), 0)
        index.put(stale, location)
        tiers_of(cache)[1].promoter.want(stale)
        await until(lambda: index.locate(stale) is None)
        await cache.drain()
        assert held(cache, "ssd", refs) == refs
        assert counters(cache, "mem").promoted == 0
        recount(cache)


async def test_promoted_although_nothing_was_stored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """Blocks come to the end of their rest by themselves, not only when others are copied."""
    async with serving(origin, ssd(tmp_path)) as cache:
        refs = await fill(cache, origin, 3, "f")
        await cache.add_tier(mem(tmp_path))
        await assert_right(cache, origin, refs)
        assert counters(cache, "mem").promoted == 0
        monkeypatch.setattr(cooldown, "COOLDOWN_S", 0.0)
        await assert_right(cache, origin, refs)
        await until(lambda: counters(cache, "mem").promoted == 3)
        assert origin.counters.gets == 3


async def test_wanted_many_times_moved_once(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    async with serving(origin, ssd(tmp_path)) as cache:
        refs = await below_only(cache, origin, mem(tmp_path, disk))
        disk.hang("create", "write")
        await assert_right(cache, origin, refs[:1])
        await until(lambda: disk.hanging)
        for _ in range(50):
            await assert_right(cache, origin, refs)
        assert waiting(cache, 1) == 3
        disk.heal()
        await until(lambda: counters(cache, "mem").promoted == 3)
        assert counters(cache, "mem").admitted == 3
        assert_each_once(cache, refs)
        recount(cache)


# -- readers -------------------------------------------------------------------------------------


async def test_nobody_waits_for_a_block_on_its_way_down(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    source = FaultyDisk()
    async with serving(origin, mem(tmp_path, source), ssd(tmp_path, disk)) as cache:
        disk.hang("create", "write")
        refs = await overfill(cache, origin)
        await until(lambda: disk.hanging)
        for source.cold in (False, True):
            with trio.fail_after(PATIENCE_S):
                await assert_right(cache, origin, refs)
        assert disk.hanging
        assert counters(cache, "mem").hits == 2 * len(refs)
        assert counters(cache, "mem").demoted == 0
        disk.heal()
        await until(lambda: swept(cache))
        assert_each_once(cache, refs)
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == len(refs)
        recount(cache)


async def test_nobody_waits_for_a_block_on_its_way_up(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    source = FaultyDisk()
    async with serving(origin, ssd(tmp_path, source)) as cache:
        refs = await below_only(cache, origin, mem(tmp_path, disk))
        disk.hang("create", "write")
        await assert_right(cache, origin, refs)
        await until(lambda: disk.hanging)
        for source.cold in (False, True):
            with trio.fail_after(PATIENCE_S):
                await assert_right(cache, origin, refs)
        assert disk.hanging
        assert counters(cache, "ssd").hits == 9
        disk.heal()
        await until(lambda: counters(cache, "mem").promoted == 3)
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == 3
        recount(cache)


# -- what happens to a block meanwhile -----------------------------------------------------------


def _slot_of(store: TierStore, ref: ObjectRef):
    location = store.index.locate(key_of(ref))
    assert location is not None
    return store.slabs.by_id[location.slab], location.slot


def evict(store: TierStore, ref: ObjectRef) -> None:
    location = store.index.locate(key_of(ref))
    assert location is not None
    slab = store.slabs.by_id[location.slab]
    store.evict(slab, location.slot, SlotEntry(key_of(ref), location.length, location.checksum))
    store.put_row(slab)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_evicted_on_its_way(
    way: str, tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    """The copy arrives all the same; what is in the slot by then is left alone."""
    upper, lower = (disk, None) if way == "up" else (None, disk)
    async with serving(origin, ssd(tmp_path, lower)) as cache:
        if way == "up":
            refs = await below_only(cache, origin, mem(tmp_path, upper))
            disk.hang("create", "write")
            await assert_right(cache, origin, refs)
        else:
            await cache.add_tier(mem(tmp_path))
            disk.hang("create", "write")
            refs = await overfill(cache, origin)
        await until(lambda: disk.hanging)
        source, target = ("ssd", "mem") if way == "up" else ("mem", "ssd")
        evicted = next(ref for ref in refs if key_of(ref) in moving(cache))
        evict(store_of(cache, source), evicted)
        assert held(cache, source, refs) == [ref for ref in refs if ref is not evicted]
        recount(cache)
        disk.heal()
        await until(lambda: evicted in held(cache, target, refs))
        await until(lambda: swept(cache))
        await cache.drain()
        assert_each_once(cache, refs)
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == len(refs)
        recount(cache)


@pytest.mark.parametrize("up", [False, True])
async def test_what_is_pinned_on_its_way_is_pinned_where_it_arrives(
    tmp_path: Path, disk: FaultyDisk, up: bool, origin: MemoryOrigin
) -> None:
    async with _on_their_way(origin, tmp_path, disk, up) as (cache, refs):
        assert (await cache.objects.pin(refs)).blocks == len(refs)
        disk.heal()
        await until(lambda: not moving(cache))
        where = [await cache.objects.where(ref) for ref in refs]
        assert sum(found.pinned_bytes for found in where) == BLOCK * len(refs)
        assert sum(counters(cache, name).promoted for name in ("mem", "ssd")) == (up and len(refs))
        assert up or counters(cache, "mem").demoted > 0
        assert_each_once(cache, refs)
        recount(cache)


@pytest.mark.parametrize("up", [False, True])
async def test_what_is_dropped_on_its_way_does_not_arrive(
    tmp_path: Path, disk: FaultyDisk, up: bool, origin: MemoryOrigin
) -> None:
    async with _on_their_way(origin, tmp_path, disk, up) as (cache, refs):
        assert (await cache.objects.evict(refs)).blocks == len(refs)
        disk.heal()
        await until(lambda: not moving(cache))
        await cache.drain()
        assert held(cache, "mem", refs) == held(cache, "ssd", refs) == []
        assert all(status.used_bytes == 0 for status in cache.status())
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert_each_once(cache, refs)  # who reads them may have them again
        recount(cache)


@asynccontextmanager
async def _on_their_way(
    origin: MemoryOrigin, root: Path, disk: FaultyDisk, up: bool
) -> AsyncIterator[tuple[BlockCache, list[ObjectRef]]]:
    """Some of the blocks are copied, which is held up by the disk that they go to."""
    if up:
        async with serving(origin, ssd(root)) as cache:
            refs = await below_only(cache, origin, mem(root, disk))
            disk.hang("create", "write")
            await assert_right(cache, origin, refs)
            await until(lambda: disk.hanging)
            await until(lambda: len(tiers_of(cache)[1].mover.moving) == len(refs))
            yield cache, refs
    else:
        async with serving(origin, mem(root), ssd(root, disk)) as cache:
            disk.hang("create", "write")
            refs = await overfill(cache, origin)
            await until(lambda: disk.hanging)
            yield cache, refs


# -- tiers that go -------------------------------------------------------------------------------


@pytest.mark.parametrize("others", ["one below", "none"])
async def test_the_tier_that_blocks_go_down_to_is_removed(
    others: str, tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    rest = [hdd(tmp_path)] if others == "one below" else []
    async with serving(origin, mem(tmp_path), ssd(tmp_path, disk), *rest) as cache:
        disk.hang("create", "write")
        refs = await overfill(cache, origin)
        await until(lambda: disk.hanging)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.remove_tier, tmp_path / "ssd")
            await until(lambda: len(stores(cache)) == 1 + len(rest))
            await until(lambda: swept(cache))
            disk.heal()
        if rest:
            assert len(held(cache, "hdd", refs)) == counters(cache, "mem").demoted > 10
            assert_each_once(cache, refs)
        await assert_right(cache, origin, refs)
        recount(cache)
        # What was being written when it left may be there; it is the right bytes.
        await cache.add_tier(ssd(tmp_path))
        await assert_right(cache, origin, refs)
        assert (origin.counters.gets == len(refs)) == bool(rest)
        recount(cache)


async def test_the_tier_that_blocks_go_down_from_is_removed(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    async with serving(origin, mem(tmp_path), ssd(tmp_path, disk)) as cache:
        disk.hang("create", "write")
        refs = await overfill(cache, origin)
        await until(lambda: disk.hanging)
        on_their_way = moving(cache)
        with trio.fail_after(PATIENCE_S):
            await cache.remove_tier(tmp_path / "mem")
        assert disk.hanging
        disk.heal()
        await cache.drain()
        assert {key_of(ref) for ref in held(cache, "ssd", refs)} == on_their_way
        # It kept what was on its way, so both have that now. Nothing else goes down meanwhile.
        for ref in refs:
            tiers_of(cache).common.cooldown.begin(key_of(ref), time.monotonic())
        await cache.add_tier(mem(tmp_path))
        assert held(cache, "mem", refs) == refs
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == len(refs)
        recount(cache)


async def test_the_tier_that_blocks_go_up_to_is_removed(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    """One block is on its way, others wait for theirs; then there is nothing above them."""
    async with serving(origin, ssd(tmp_path)) as cache:
        refs = await below_only(cache, origin, mem(tmp_path, disk))
        disk.hang("create", "write")
        await assert_right(cache, origin, refs[:1])
        await until(lambda: disk.hanging)
        await assert_right(cache, origin, refs)
        assert waiting(cache, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.remove_tier, tmp_path / "mem")
            await until(lambda: len(stores(cache)) == 1)
            await until(lambda: not waiting(cache, 0))
            disk.heal()
        assert held(cache, "ssd", refs) == refs
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == 3
        recount(cache)


async def test_the_tier_that_blocks_go_up_from_is_removed(
    tmp_path: Path, disk: FaultyDisk, origin: MemoryOrigin
) -> None:
    async with serving(origin, ssd(tmp_path)) as cache:
        refs = await below_only(cache, origin, mem(tmp_path, disk))
        disk.hang("create", "write")
        await assert_right(cache, origin, refs)
        await until(lambda: disk.hanging)
        with trio.fail_after(PATIENCE_S):
            await cache.remove_tier(tmp_path / "ssd")
        assert disk.hanging
        disk.heal()
        await cache.drain()
        assert len(held(cache, "mem", refs)) >= 1
        await assert_right(cache, origin, refs)
        recount(cache)
        await cache.add_tier(ssd(tmp_path))
        assert held(cache, "ssd", refs) == refs
        await assert_right(cache, origin, refs)
        recount(cache)


@pytest.mark.expect_log("does not answer", required=False)
@pytest.mark.parametrize("way", ["up", "down"])
async def test_closing_while_blocks_move(
    way: str,
    tmp_path: Path,
    disk: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    origin: MemoryOrigin,
) -> None:
    monkeypatch.setattr(active_tier, "CLOSE_TIMEOUT_S", 0.2)
    async with serving(origin, ssd(tmp_path, disk if way == "down" else None)) as cache:
        if way == "up":
            refs = await below_only(cache, origin, mem(tmp_path, disk))
            disk.hang("create", "write")
            await assert_right(cache, origin, refs)
        else:
            await cache.add_tier(mem(tmp_path))
            disk.hang("create", "write")
            refs = await overfill(cache, origin)
        await until(lambda: disk.hanging)
        with trio.fail_after(PATIENCE_S):
            await cache.aclose(drain_s=0.1)
    disk.heal()
    source, medium = ("ssd", Medium.SSD) if way == "up" else ("mem", Medium.MEM)
    quota_bytes = 32 * MIB if way == "up" else 8 * MIB
    async with serving(origin, open_tier(tmp_path / source, quota_bytes, medium=medium)) as cache:
        assert held(cache, source, refs) == refs
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == len(refs)
        recount(cache)


# -- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", ["ssd", "mem"])
async def test_crash_between_the_commits_of_a_move(
    committed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """One index knows of the moves, the other doesn't. `ssd`: both tiers hold the blocks. `mem`:
    neither does, until they are found in the slots."""
    monkeypatch.setattr(store_module, "COMMIT_INTERVAL_S", 1e6)
    left = tmp_path / "left"
    async with serving(origin, mem(tmp_path), ssd(tmp_path), crash=True) as cache:
        refs = await fill(cache, origin, 64, "f")
        await store_of(cache, "mem").index.commit()
        have_rested(cache, refs)
        tiers_of(cache)[0].evictor.wake()
        await until(lambda: swept(cache))
        await cache.drain()
        moved = held(cache, "ssd", refs)
        assert len(moved) > 10
        await store_of(cache, committed).index.commit()
        for name in ("mem", "ssd"):
            no_lock = shutil.ignore_patterns("lock*")
            shutil.copytree(tmp_path / name, left / name, ignore=no_lock)

    above = open_tier(left / "mem", 8 * MIB, medium=Medium.MEM)  # nothing moves at first
    async with serving(origin, above, ssd(left)) as cache:
        await until(lambda: not any(store.files.must_reconcile for store in stores(cache)))
        assert held(cache, "ssd", moved) == moved
        if committed == "ssd":
            assert held(cache, "mem", moved) == moved
        await assert_right(cache, origin, refs)
        recount(cache)
        # All go down now; those of which the other has a copy, without another one.
        above.watermarks = Watermarks(0, 0)
        tiers_of(cache)[0].evictor.wake()
        await until(lambda: swept(cache))
        assert_each_once(cache, refs)
        assert counters(cache, "ssd").admitted == len(refs) - len(moved)
        await assert_right(cache, origin, refs)
        recount(cache)
    assert origin.counters.gets == len(refs)
    for name in ("mem", "ssd"):
        report = check_directory(left / name)
        assert not report.counts, report
