"""Whatever happens to the files: right bytes, everything counted, one warning a slab.

Not here: bytes that change under a running daemon (test_integrity.py).
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.cache.check.directory import check_directory
from cachefs.cache.counters import TierCounters
from cachefs.db import Database
from cachefs.errors import CacheDirError, OriginUnavailableError
from cachefs.format.index_record import (
    BLOCKS_TABLE,
    SLABS_TABLE,
    STATE_TABLE,
    TABLES,
    TIER_KEY,
    decode_location,
    encode_location,
)
from cachefs.format.paths import TierPaths
from cachefs.format.slab import decode_header, slab_layout, table_offset
from cachefs.types import ObjectRef
from tests.cache.harness import (
    MIB,
    assert_right,
    open_tier,
    put_many,
    read_whole,
    recount,
    serving,
    until,
    will_close_cleanly,
)
from tests.memory_origin import MemoryOrigin

SMALL, LARGE = 40, 8
ALL = SMALL + LARGE


async def fill(path: Path) -> tuple[MemoryOrigin, list[ObjectRef]]:
    """40 small blocks in slab 0, 7 large ones in slab 1, the eighth in slab 2."""
    origin = MemoryOrigin()
    refs = put_many(origin, SMALL, 30_000) + put_many(origin, LARGE, 500_000, "g")
    async with serving(origin, open_tier(path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        await will_close_cleanly(cache)
    assert len(list(TierPaths(path).slabs.iterdir())) == 3
    return origin, refs


def slab(path: Path, number: int) -> Path:
    return TierPaths(path).slab(number)


def flip(path: Path, offset: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in old))


def slot_offset(path: Path, slot: int) -> int:
    header = decode_header(path.read_bytes()[:4096])
    assert header is not None
    return slab_layout(header.class_index, header.slab_bytes).slot_offset(slot)


def flip_slots(path: Path) -> None:
    for number, slot in ((0, 0), (0, 17), (1, 3)):
        place = slab(path, number)
        flip(place, slot_offset(place, slot) + 12_345, 1)


def flip_table(path: Path) -> None:
    flip(slab(path, 0), table_offset(0), SMALL * 32)


def flip_header(path: Path) -> None:
    flip(slab(path, 0), 30, 1)


def empty(path: Path) -> None:
    os.truncate(slab(path, 0), 0)


def cut_in_table(path: Path) -> None:
    os.truncate(slab(path, 0), table_offset(3) + 5)


def cut_in_slot(path: Path) -> None:
    os.truncate(slab(path, 0), slot_offset(slab(path, 0), 10) + 29_999)


def delete(path: Path) -> None:
    slab(path, 0).unlink()


def delete_all(path: Path) -> None:
    for number in range(3):
        slab(path, number).unlink()


def swap(path: Path) -> None:
    slab(path, 0).rename(path / "x")
    slab(path, 1).rename(slab(path, 0))
    (path / "x").rename(slab(path, 1))


def swap_within_class(path: Path) -> None:
    slab(path, 2).rename(path / "x")
    slab(path, 1).rename(slab(path, 2))
    (path / "x").rename(slab(path, 1))


def copy_over(path: Path) -> None:
    shutil.copy(slab(path, 1), slab(path, 0))


def copy_beside(path: Path) -> None:
    shutil.copy(slab(path, 1), slab(path, 7))


def directory(path: Path) -> None:
    delete(path)
    (slab(path, 0) / "below").mkdir(parents=True)


def symlink(path: Path) -> None:
    slab(path, 0).rename(path.parent / "elsewhere")
    slab(path, 0).symlink_to(path.parent / "elsewhere")


def all_zero(path: Path) -> None:
    for number in range(3):
        slab(path, number).write_bytes(bytes(slab(path, number).stat().st_size))


def slab_problems(counters: TierCounters) -> tuple[int, int]:
    return counters.bad_slabs, counters.bad_blocks


SLAB_DAMAGE = [
    (flip_slots, (0, 3)),
    (flip_table, (0, 0)),  # the index knows better; see the eviction test
    (flip_header, (1, SMALL)),
    (empty, (1, SMALL)),
    (cut_in_table, (0, SMALL)),
    (cut_in_slot, (0, SMALL - 10)),
    (delete, (1, SMALL)),
    (delete_all, (3, ALL)),
    (swap, (2, SMALL + 7)),
    (swap_within_class, (2, LARGE)),
    (copy_over, (1, SMALL)),
    (copy_beside, (1, 0)),
    (directory, (1, SMALL)),
    (symlink, (1, SMALL)),
    (all_zero, (3, ALL)),
]
"""Damage, and what is counted for it: bad slabs and bad blocks."""

of_slabs = pytest.mark.parametrize(
    ("damage", "counted"), SLAB_DAMAGE, ids=lambda value: getattr(value, "__name__", "")
)
warns_of_slabs = pytest.mark.expect_log(
    "a block is not what|can't be opened|header is damaged", required=False
)


def assert_one_warning_a_slab(caplog: pytest.LogCaptureFixture) -> None:
    warned = Counter(record.getMessage().partition(": ")[0] for record in caplog.records)
    assert all(count == 1 for count in warned.values()), warned


@of_slabs
@warns_of_slabs
async def test_slabs_damaged_while_nobody_looks(
    tmp_path: Path,
    damage: Callable[[Path], None],
    counted: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "cache"
    origin, refs = await fill(path)
    damage(path)
    async with serving(origin, open_tier(path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        counters = cache.status()[0].counters
        await until(lambda: counters.bad_slabs >= counted[0])
        assert slab_problems(counters) == counted
        assert origin.counters.gets == ALL + counted[1]
        recount(cache)
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == ALL + counted[1]  # what was fetched again is kept
    assert_one_warning_a_slab(caplog)


@of_slabs
@warns_of_slabs
async def test_damage_while_the_origin_is_down_is_an_error(
    tmp_path: Path, damage: Callable[[Path], None], counted: tuple[int, int]
) -> None:
    """Never bad bytes, and what is not damaged is served."""
    path = tmp_path / "cache"
    origin, refs = await fill(path)
    damage(path)
    origin.fail_next(10_000, OriginUnavailableError("the origin is down"))
    async with serving(origin, open_tier(path)) as cache:
        failed = 0
        for ref in refs:
            try:
                assert await read_whole(cache, ref) == origin.expected(ref.path)
            except OriginUnavailableError:
                failed += 1
        assert failed == counted[1]
        recount(cache)


@pytest.mark.parametrize(
    ("damage", "bad_blocks"),
    [(flip_slots, 3), (cut_in_table, SMALL), (cut_in_slot, SMALL - 10), (empty, SMALL)],
)
@pytest.mark.parametrize("opened", [False, True], ids=["slab not open", "slab open"])
@warns_of_slabs
async def test_slabs_damaged_under_a_running_daemon(
    tmp_path: Path,
    damage: Callable[[Path], None],
    bad_blocks: int,
    opened: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "cache"
    origin, refs = await fill(path)
    async with serving(origin, open_tier(path)) as cache:
        if opened:  # by reading a block that the damage spares: the last of each class
            await assert_right(cache, origin, [refs[SMALL - 1], refs[SMALL + 6]])
        damage(path)
        await assert_right(cache, origin, refs)
        await cache.drain()
        counters = cache.status()[0].counters
        assert counters.bad_blocks == bad_blocks
        assert counters.bad_slabs == int(damage is empty and not opened)
        recount(cache)
        await assert_right(cache, origin, refs)
    assert origin.counters.gets == ALL + bad_blocks
    assert_one_warning_a_slab(caplog)


@pytest.mark.parametrize("size_bytes", [0, 4 * MIB])
async def test_a_slab_without_a_header_that_a_kill_has_left_is_no_damage(
    tmp_path: Path, size_bytes: int
) -> None:
    origin, refs = await fill(tmp_path)
    slab(tmp_path, 7).write_bytes(bytes(size_bytes))
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.is_reconciled)
        assert slab_problems(cache.status()[0].counters) == (0, 0)
        await assert_right(cache, origin, refs)
        more = put_many(origin, 100, 30_000, "more")
        await assert_right(cache, origin, more)
        await cache.drain()
        recount(cache)
    assert origin.counters.gets == ALL + len(more)


@warns_of_slabs
async def test_slabs_cut_after_their_blocks_were_verified(tmp_path: Path) -> None:
    """A short read is seen without a checksum."""
    origin, refs = await fill(tmp_path)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        cut_in_slot(tmp_path)
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert slab_problems(cache.status()[0].counters) == (0, SMALL - 10)
        recount(cache)


@warns_of_slabs
async def test_slabs_deleted_under_a_running_daemon(tmp_path: Path) -> None:
    """Those that are open are served until the end; the others, and after it all, are lost."""
    origin, refs = await fill(tmp_path)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs[:1])
        delete_all(tmp_path)
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert slab_problems(cache.status()[0].counters) == (2, LARGE)
        recount(cache)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert slab_problems(cache.status()[0].counters) == (1, SMALL)
        recount(cache)


@warns_of_slabs
async def test_a_slot_table_that_lies_to_the_evictor(tmp_path: Path) -> None:
    """Eviction learns keys from the table: with a wrong one the row of the evicted block stays,
    and points to a slot that may get another block."""
    origin, refs = await fill(tmp_path)
    flip_table(tmp_path)
    more = put_many(origin, 300, 30_000, "more")
    async with serving(origin, open_tier(tmp_path, 12 * MIB)) as cache:
        for _ in range(2):
            await assert_right(cache, origin, refs + more)
        await cache.drain()
        assert cache.status()[0].counters.evicted > 0
        for ref in refs + more:  # a row is dropped when it is asked for
            await read_whole(cache, ref)
            await cache.drain()
    async with serving(origin, open_tier(tmp_path, 12 * MIB)) as cache:
        await assert_right(cache, origin, refs + more)


def index_file(path: Path) -> Path:
    return TierPaths(path).index / "data.mdb"


def index_cut(path: Path) -> None:
    os.truncate(index_file(path), index_file(path).stat().st_size // 2)


def index_cut_by_a_byte(path: Path) -> None:
    os.truncate(index_file(path), index_file(path).stat().st_size - 1)


def index_garbage(path: Path) -> None:
    size = index_file(path).stat().st_size
    index_file(path).write_bytes(os.urandom(size))


def index_zeroed(path: Path) -> None:
    size = index_file(path).stat().st_size
    index_file(path).write_bytes(index_file(path).read_bytes()[:8192].ljust(size, b"\0"))


def index_of_another(path: Path) -> None:
    shutil.rmtree(TierPaths(path).index)
    shutil.copytree(TierPaths(path.parent / "other").index, TierPaths(path).index)


def index_a_file(path: Path) -> None:
    shutil.rmtree(TierPaths(path).index)
    TierPaths(path).index.write_text("x")


@pytest.mark.parametrize(
    "damage",
    [
        *[index_cut, index_cut_by_a_byte, index_garbage, index_zeroed],
        *[index_of_another, index_a_file],
    ],
)
@pytest.mark.expect_log(r"index can't be used \(.*\): it is moved to index\.bad, and rebuilt")
async def test_a_bad_index_is_replaced(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    await fill(tmp_path / "other")
    path = tmp_path / "cache"
    origin, refs = await fill(path)
    for _ in range(2):  # the second index that is moved aside replaces the first
        damage(path)
        async with serving(origin, open_tier(path)) as cache:
            counters = cache.status()[0].counters
            await until(lambda counters=counters: counters.adopted == ALL)
            await assert_right(cache, origin, refs)
            assert counters.bad_index == 1
            assert slab_problems(counters) == (0, 0)
            recount(cache)
        assert os.path.lexists(TierPaths(path).bad_index)
    async with serving(origin, open_tier(path)) as cache:
        await assert_right(cache, origin, refs)
        counters = cache.status()[0].counters
        assert (counters.bad_index, counters.adopted) == (0, 0)
    assert origin.counters.gets == ALL


@pytest.mark.expect_log("index can't be used")
async def test_reads_during_the_adoption_are_right(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    index_cut(tmp_path)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        await assert_right(cache, origin, refs)
        recount(cache)


async def test_a_deleted_index(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    shutil.rmtree(TierPaths(tmp_path).index)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.status()[0].counters.adopted == ALL)
        await assert_right(cache, origin, refs)
        recount(cache)
    assert origin.counters.gets == ALL


async def test_an_index_deleted_under_a_running_daemon(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    async with serving(origin, open_tier(tmp_path)) as cache:
        shutil.rmtree(TierPaths(tmp_path).index)
        await assert_right(cache, origin, refs)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.status()[0].counters.adopted == ALL)
        await assert_right(cache, origin, refs)
    assert origin.counters.gets == ALL


async def test_an_index_from_before_it_named_its_owner(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    place = str(TierPaths(tmp_path).index)
    database = Database.open(place, TABLES, 1 << 30)
    database.delete(STATE_TABLE, TIER_KEY)
    database.close()
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        assert cache.status()[0].counters.adopted == 0
    database = Database.open(place, TABLES, 1 << 30)
    assert database.get(STATE_TABLE, TIER_KEY) is not None
    database.abandon()
    assert origin.counters.gets == ALL


@pytest.mark.parametrize("text", ["", "{", '{"format": 2, "uuid": "zz", "slab_bytes": 1}'])
async def test_a_damaged_identity_is_refused(tmp_path: Path, text: str) -> None:
    await fill(tmp_path)
    TierPaths(tmp_path).identity.write_text(text)
    with pytest.raises(CacheDirError, match=r"cachefs\.json can't be understood .* name another"):
        open_tier(tmp_path)


async def test_a_deleted_identity_is_refused(tmp_path: Path) -> None:
    """The slabs may be anybody's."""
    await fill(tmp_path)
    TierPaths(tmp_path).identity.unlink()
    with pytest.raises(CacheDirError, match=r"holds other files and no cachefs\.json"):
        open_tier(tmp_path)


@pytest.mark.expect_log("header is damaged")
async def test_another_identity_makes_the_slabs_foreign(tmp_path: Path) -> None:
    """As after a slabs directory was copied into another cache directory, index and all."""
    await fill(tmp_path / "other")
    path = tmp_path / "cache"
    origin, refs = await fill(path)
    shutil.copy(TierPaths(tmp_path / "other").identity, TierPaths(path).identity)
    shutil.rmtree(TierPaths(path).index)
    async with serving(origin, open_tier(path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        counters = cache.status()[0].counters
        await until(lambda: counters.bad_slabs == 3)
        assert counters.adopted == 0
        recount(cache)
    assert origin.counters.gets == 2 * ALL


async def test_foreign_files_beside_the_slabs_are_left_alone(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    for name in ("notes.txt", "000003.slab~", "9999999999.slab"):
        (TierPaths(tmp_path).slabs / name).write_text("dear diary")
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        recount(cache)
    assert (TierPaths(tmp_path).slabs / "9999999999.slab").read_text() == "dear diary"
    assert origin.counters.gets == ALL


@pytest.mark.expect_log("is damaged .*restart it|index can't be used")
async def test_an_index_damaged_under_a_running_daemon(tmp_path: Path) -> None:
    """What can't be looked up is fetched; the next daemon makes a new index."""
    origin, refs = await fill(tmp_path)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs[:10])
        with index_file(tmp_path).open("r+b") as file:
            file.seek(8192)
            file.write(bytes(index_file(tmp_path).stat().st_size - 8192))
        await assert_right(cache, origin, refs)
        await cache.drain()
        await assert_right(cache, origin, refs)
    async with serving(origin, open_tier(tmp_path)) as cache:
        counters = cache.status()[0].counters
        assert counters.bad_index == 1
        await until(lambda: counters.adopted >= ALL)
        await assert_right(cache, origin, refs)
        recount(cache)


def spoil_rows(path: Path) -> None:
    """Rows of wrong lengths, and one that says that nothing was proven, in a slot of another."""
    database = Database.open(str(TierPaths(path).index), TABLES, 1 << 30)
    keys = [key for key, _ in database.scan(BLOCKS_TABLE, b"")]
    other = decode_location(database.get(BLOCKS_TABLE, keys[1]) or b"")
    database.put(BLOCKS_TABLE, keys[0], encode_location(other._replace(checksum=0)))
    database.put(BLOCKS_TABLE, keys[2], b"short")
    database.put(BLOCKS_TABLE, keys[3] + b"longer", encode_location(other))
    database.put(SLABS_TABLE, b"slab?", b"")
    database.close()


@pytest.mark.expect_log("a block is not what was stored", required=False)
async def test_rows_of_the_index_that_make_no_sense(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    spoil_rows(tmp_path)
    assert check_directory(tmp_path).counts
    async with serving(origin, open_tier(tmp_path)) as cache:
        for _ in range(2):
            await assert_right(cache, origin, refs)
    check_directory(tmp_path, repair=True)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
