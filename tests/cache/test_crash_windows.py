"""One test for each row of the table in docs/DURABILITY.md.

A `SnapshotDisk` copies the cache directory at a chosen instant: that is what a SIGKILL then would
leave. The index is committed when a test says so, and at no other time.
"""

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.check.directory import check_directory
from cachefs.cache.tier import store as store_module
from cachefs.cache_dir.disk import Disk
from cachefs.format.paths import TierPaths
from cachefs.format.slab import HEADER_BYTES, SLOT_ENTRY, entry_at
from cachefs.types import ObjectRef
from tests.cache.harness import (
    MIB,
    assert_right,
    key_of,
    open_tier,
    put_many,
    recount,
    serving,
    stores,
    until,
)
from tests.memory_origin import MemoryOrigin

QUOTA_BYTES = 12 * MIB  # three slabs of 4 MiB

Instant = Callable[[str, int, int], bool]
"""Before an operation of that kind, at that offset, of that many bytes."""


class SnapshotDisk(Disk):
    def __init__(self, root: Path, into: Path) -> None:
        self._root = root
        self._into = into
        self._instant: Instant = lambda kind, offset, size: False

    def arm(self, instant: Instant) -> None:
        """Take the snapshot at the first such instant from now on."""
        self._instant = instant

    @property
    def taken(self) -> bool:
        return self._into.exists()

    def snapshot(self) -> None:
        shutil.copytree(self._root, self._into, ignore=shutil.ignore_patterns("lock*"))

    def _before(self, kind: str, offset: int = 0, size: int = 0) -> None:
        if not self.taken and self._instant(kind, offset, size):
            self.snapshot()

    def create(self, path: Path, size_bytes: int) -> int:
        self._before("create")
        return super().create(path, size_bytes)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._before("write", offset, len(data))
        super().write(fd, data, offset)

    def unlink(self, path: Path) -> None:
        self._before("unlink")
        super().unlink(path)
        self._before("unlinked")


def is_table(kind: str, offset: int, size: int) -> bool:
    return kind == "write" and offset == HEADER_BYTES and size > SLOT_ENTRY.size


def is_header(kind: str, offset: int, size: int) -> bool:
    return kind == "write" and offset == 0


def is_entry(kind: str, offset: int, size: int) -> bool:
    return kind == "write" and offset >= HEADER_BYTES and size == SLOT_ENTRY.size


def is_data(kind: str, offset: int, size: int) -> bool:
    return kind == "write" and size > HEADER_BYTES and offset > HEADER_BYTES


def after(first: Instant, then: Instant) -> Instant:
    seen = False

    def instant(kind: str, offset: int, size: int) -> bool:
        nonlocal seen
        if seen:
            return then(kind, offset, size)
        seen = first(kind, offset, size)
        return False

    return instant


class Scene:
    """A cache directory that is going to be crashed, and what is left of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.origin = MemoryOrigin()
        self.path = tmp_path / "cache"
        self.left = tmp_path / "left"
        self.disk = SnapshotDisk(self.path, self.left)

    def serving(self, quota_bytes: int = QUOTA_BYTES):
        tier = open_tier(self.path, quota_bytes, disk=self.disk)
        return serving(self.origin, tier, crash=True)

    def slab(self, number: int) -> Path:
        return TierPaths(self.left).slab(number)

    async def read(self, cache: BlockCache, refs: list[ObjectRef]) -> None:
        await assert_right(cache, self.origin, refs)
        await cache.drain()

    async def find(
        self,
        refs: list[ObjectRef],
        *,
        gets: int,
        bad_blocks: int = 0,
        bad_slabs: int = 0,
        adopted: int | None = None,
        reconciled: bool = False,
    ) -> None:
        """The next daemon: right bytes of everything, at that price; then all is in order."""
        before = self.origin.counters.gets
        async with serving(self.origin, open_tier(self.left, QUOTA_BYTES)) as cache:
            counters = cache.status()[0].counters
            if reconciled:
                await until(lambda: not stores(cache)[0].files.must_reconcile)
            if adopted is not None:
                await until(lambda: counters.adopted >= adopted)
            await self.read(cache, refs)
            assert self.origin.counters.gets - before == gets
            assert (counters.bad_blocks, counters.bad_slabs) == (bad_blocks, bad_slabs)
            assert adopted in {None, counters.adopted}
            recount(cache)
        report = check_directory(self.left)
        assert not report.counts, report


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(store_module, "COMMIT_INTERVAL_S", 1e6)
    return Scene(tmp_path)


# -- storing a block ---------------------------------------------------------------------------


@pytest.mark.expect_log("a block is not what was stored")
async def test_table_entry_written_block_not(scene: Scene) -> None:
    refs = put_many(scene.origin, 1, 30_000)
    scene.disk.arm(is_data)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
    await scene.find(refs, gets=1, bad_blocks=1, adopted=1)


async def test_block_written_index_not_committed(scene: Scene) -> None:
    refs = put_many(scene.origin, 20, 30_000)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
        scene.disk.snapshot()
    await scene.find(refs, gets=0, adopted=20)


async def test_block_in_a_known_slab_index_not_committed(scene: Scene) -> None:
    early, late = put_many(scene.origin, 5, 30_000), put_many(scene.origin, 5, 30_000, "late")
    async with scene.serving() as cache:
        await scene.read(cache, early)
        await stores(cache)[0].index.commit()
        await scene.read(cache, late)
        scene.disk.snapshot()
    await scene.find(early + late, gets=0, reconciled=True)


async def test_right_after_a_start_after_a_clean_close(scene: Scene) -> None:
    """The directory doesn't count as cleanly closed any more."""
    early, late = put_many(scene.origin, 5, 30_000), put_many(scene.origin, 5, 30_000, "late")
    async with serving(scene.origin, open_tier(scene.path, QUOTA_BYTES)) as cache:
        await scene.read(cache, early)
    async with scene.serving() as cache:
        await scene.read(cache, late)
        scene.disk.snapshot()
    await scene.find(early + late, gets=0, adopted=5)


# -- a new slab ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allocated", [True, False])
async def test_slab_file_made_header_not_written(scene: Scene, allocated: bool) -> None:
    """That is no damage. Its space is taken for the next class that wants some."""
    refs = put_many(scene.origin, 3, 30_000)
    scene.disk.arm(is_header)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
    if not allocated:
        os.truncate(scene.slab(0), 0)
    before = scene.origin.counters.gets
    async with serving(scene.origin, open_tier(scene.left, QUOTA_BYTES)) as cache:
        counters = cache.status()[0].counters
        await until(lambda: cache.is_reconciled)
        assert counters.bad_slabs == 0
        await scene.read(cache, refs)
        recount(cache)
    assert scene.origin.counters.gets == before + 3
    assert [path.name for path in TierPaths(scene.left).slabs.iterdir()] == ["000000.slab"]
    assert check_directory(scene.left).blocks == 3


async def test_slab_made_no_block_in_it(scene: Scene) -> None:
    refs = put_many(scene.origin, 3, 30_000)
    scene.disk.arm(is_entry)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
    await scene.find(refs, gets=3, adopted=0)


# -- another class -------------------------------------------------------------------------------


async def reassigned(scene: Scene, instant: Instant) -> tuple[list[ObjectRef], int]:
    """Committed with small blocks only; then large ones want room. Returns the small ones, and
    how many of them were in the slab that had to change."""
    small = put_many(scene.origin, 340, 30_000)
    large = put_many(scene.origin, 3, 900_000, "g")
    async with scene.serving() as cache:
        await scene.read(cache, small)
        store = stores(cache)[0]
        await store.index.commit()
        held = [ref for ref in small if await cache.cached_fraction(ref)]
        counts = {slab.slab_id: slab.used_count for slab in store.slabs.by_id.values()}
        scene.disk.arm(instant)
        await scene.read(cache, large)
        if not scene.disk.taken:
            scene.disk.snapshot()
        changed = [
            slab.slab_id
            for slab in store.slabs.by_id.values()
            if slab.slab_id in counts and slab.slot_bytes >= 900_000
        ]
        assert len(counts) == 3
        assert len(changed) == 1
    return held, counts[changed[0]]


@pytest.mark.expect_log("a block is not what was stored")
async def test_table_emptied_header_not_written(scene: Scene) -> None:
    """The index still knows the blocks, but nobody can say whose slots these are."""
    refs, held = await reassigned(scene, is_header)
    lost = min(held, HEADER_BYTES // SLOT_ENTRY.size)  # the new class has a shorter table
    await scene.find(refs, gets=lost, bad_blocks=lost, reconciled=True)


@pytest.mark.expect_log("a block is not what was stored|header", required=False)
async def test_header_written_index_not_committed(scene: Scene) -> None:
    refs, lost = await reassigned(scene, after(is_header, is_entry))
    await scene.find(refs, gets=lost, bad_blocks=lost)


@pytest.mark.expect_log("a block is not what was stored|header", required=False)
async def test_blocks_of_the_new_class_stored_index_not_committed(scene: Scene) -> None:
    refs, lost = await reassigned(scene, lambda *_: False)
    before = scene.origin.counters.gets
    async with serving(scene.origin, open_tier(scene.left, QUOTA_BYTES + 4 * MIB)) as cache:
        await scene.read(cache, refs)
        counters = cache.status()[0].counters
        assert counters.bad_blocks == lost
        assert counters.adopted == 3
        recount(cache)
    assert scene.origin.counters.gets == before + lost


# -- eviction ------------------------------------------------------------------------------------


def evict_all(cache: BlockCache) -> None:
    store = stores(cache)[0]
    for slab in store.slabs.by_id.values():
        table = store.directory.read_table(slab.fd, slab.layout)
        for slot in list(slab.used_slots()):
            store.evict(slab, slot, entry_at(table, slot, slab.mask))
        store.put_row(slab)
        slab.free_hint = 0


async def test_evicted_index_not_committed(scene: Scene) -> None:
    refs = put_many(scene.origin, 20, 30_000)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
        await stores(cache)[0].index.commit()
        evict_all(cache)
        scene.disk.snapshot()
    await scene.find(refs, gets=0, adopted=0)


@pytest.mark.expect_log("a block is not what was stored")
async def test_evicted_and_slots_reused_index_not_committed(scene: Scene) -> None:
    old, new = put_many(scene.origin, 20, 30_000), put_many(scene.origin, 20, 30_000, "new")
    async with scene.serving() as cache:
        await scene.read(cache, old)
        await stores(cache)[0].index.commit()
        evict_all(cache)
        await scene.read(cache, new)
        scene.disk.snapshot()
    await scene.find(old + new, gets=20, bad_blocks=20, adopted=20)


@pytest.mark.expect_log("a block is not what was stored")
async def test_evicted_and_slots_reused_and_the_new_blocks_lost(scene: Scene) -> None:
    """Only a power cut does that: the index is synced, the slabs are not."""
    old, new = put_many(scene.origin, 20, 30_000), put_many(scene.origin, 20, 30_000, "new")
    async with scene.serving() as cache:
        await scene.read(cache, old)
        slab = TierPaths(scene.path).slab(0).read_bytes()
        evict_all(cache)
        await scene.read(cache, new)
        await stores(cache)[0].index.commit()
        scene.disk.snapshot()
    scene.slab(0).write_bytes(slab)
    await scene.find(new + old, gets=20, bad_blocks=20, adopted=20)


@pytest.mark.expect_log("a block is not what was stored")
async def test_slots_reused_and_the_new_entries_lost(scene: Scene) -> None:
    """The old blocks are adopted, and both are said to be in the slots. Nobody is served the new
    ones, although their bytes are there: their slots would be freed with the old ones' lengths."""
    old, new = put_many(scene.origin, 20, 30_000), put_many(scene.origin, 20, 29_000, "new")
    async with scene.serving() as cache:
        await scene.read(cache, old)
        layout = stores(cache)[0].slabs.by_id[0].layout
        table = TierPaths(scene.path).slab(0).read_bytes()[: layout.data_offset]
        evict_all(cache)
        await scene.read(cache, new)
        await stores(cache)[0].index.commit()
        scene.disk.snapshot()
    with scene.slab(0).open("r+b") as file:
        file.write(table)
    await scene.find(new + old, gets=40, bad_blocks=40, adopted=20, reconciled=True)


# -- a slab is deleted -----------------------------------------------------------------------------


async def deleted(scene: Scene, kind: str) -> list[ObjectRef]:
    refs = put_many(scene.origin, 300, 30_000)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
        await stores(cache)[0].index.commit()
        refs = [ref for ref in refs if await cache.cached_fraction(ref)]
    scene.disk.arm(lambda at, *_: at == kind)
    async with scene.serving(8 * MIB) as cache:
        await until(lambda: scene.disk.taken)
    return refs


async def test_emptied_slab_not_deleted(scene: Scene) -> None:
    refs = await deleted(scene, "unlink")
    await scene.find(refs, gets=0)


async def test_slab_deleted_index_not_committed(scene: Scene) -> None:
    refs = await deleted(scene, "unlinked")
    report = check_directory(scene.left)
    lost = len(refs) - report.blocks
    assert 0 < lost < len(refs)
    await scene.find(refs, gets=lost, bad_blocks=lost, bad_slabs=1)


async def test_a_lost_slabs_number_is_not_given_to_another(scene: Scene) -> None:
    """Blocks that are said to be in the lost one would be looked for in the new one."""
    refs = put_many(scene.origin, 300, 30_000)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
        await stores(cache)[0].index.commit()
        store = stores(cache)[0]
        last = max(store.slabs.by_id)
        locations = [store.index.locate(key_of(ref)) for ref in refs]
        lost = sum(location is not None and location.slab == last for location in locations)
        scene.disk.snapshot()
    scene.slab(last).unlink()
    assert lost > 1
    for _ in range(2):  # the row of the slab itself goes first
        async with serving(scene.origin, open_tier(scene.left, QUOTA_BYTES)):
            pass
    async with serving(scene.origin, open_tier(scene.left, QUOTA_BYTES)) as cache:
        for ref in refs:  # stored before the next is looked for
            await scene.read(cache, [ref])
        assert cache.status()[0].counters.bad_blocks == lost
        recount(cache)
    await scene.find(refs, gets=0)


# -- the index -----------------------------------------------------------------------------------


async def test_in_the_middle_of_an_index_commit(scene: Scene) -> None:
    """LMDB writes new pages beside the old ones, syncs, and then one of its two head pages."""
    early, late = put_many(scene.origin, 5, 30_000), put_many(scene.origin, 5, 30_000, "late")
    data = TierPaths(scene.path).index / "data.mdb"
    async with scene.serving() as cache:
        await scene.read(cache, early)
        await stores(cache)[0].index.commit()
        heads = data.read_bytes()[:8192]
        await scene.read(cache, late)
        await stores(cache)[0].index.commit()
        assert data.read_bytes()[:8192] != heads
        scene.disk.snapshot()
    with (TierPaths(scene.left).index / "data.mdb").open("r+b") as file:
        file.write(heads)
    report = check_directory(scene.left)
    assert not report.counts
    assert (report.blocks, report.recoverable) == (5, 5)
    await scene.find(early + late, gets=0, reconciled=True)


async def test_a_new_index_in_place_of_a_bad_one_not_committed(scene: Scene) -> None:
    """It is as empty as before: the slabs are asked once more."""
    refs = put_many(scene.origin, 20, 30_000)
    async with scene.serving() as cache:
        await scene.read(cache, refs)
        await stores(cache)[0].index.commit()
    shutil.rmtree(TierPaths(scene.path).index)
    async with scene.serving() as cache:
        await until(lambda: cache.status()[0].counters.adopted == 20)
        scene.disk.snapshot()
    await scene.find(refs, gets=0, adopted=20)


# -- power cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.expect_log("a block is not what was stored|header is damaged", required=False)
async def test_pages_that_never_reached_the_disk(scene: Scene, seed: int) -> None:
    """The index is synced, slab pages are on disk or still zero, each as it happens."""
    choice = random.Random(seed)
    refs = put_many(scene.origin, 120, 30_000) + put_many(scene.origin, 6, 500_000, "g")
    async with scene.serving() as cache:
        await scene.read(cache, refs)
        await stores(cache)[0].index.commit()
        scene.disk.snapshot()
    for slab in TierPaths(scene.left).slabs.iterdir():
        with slab.open("r+b") as file:
            for page in range(slab.stat().st_size // 4096):
                if choice.random() < 0.02:
                    file.seek(page * 4096)
                    file.write(bytes(4096))
    before = scene.origin.counters.gets
    async with serving(scene.origin, open_tier(scene.left, QUOTA_BYTES)) as cache:
        await scene.read(cache, refs)
        assert 0 < cache.status()[0].counters.bad_blocks == scene.origin.counters.gets - before
        await scene.read(cache, refs)
        recount(cache)


def test_every_row_of_the_document_has_its_test() -> None:
    here = Path(__file__)
    document = (here.parents[2] / "docs" / "DURABILITY.md").read_text()
    named = set(re.findall(r"\btest_\w+(?=[`\[])", document))
    sources = [
        here.with_name(name)
        for name in (
            "test_check.py",
            "test_object_slabs.py",
            "test_tier.py",
            "test_tier_moves.py",
            here.name,
        )
    ]
    sources += (here.parents[1] / "staging").glob("test_*.py")
    for name in ("test_killed_writers.py", "test_resent_changes.py"):
        sources.append(here.parents[1] / "mount" / name)
    defined = {
        name for source in sources for name in re.findall(r"def (test_\w+)", source.read_text())
    }
    assert len(named) > 15
    assert named <= defined
