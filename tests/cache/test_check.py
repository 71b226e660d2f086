"""`cachefs check`: what it finds, what it leaves alone, and what a repair makes of it."""

import hashlib
import os
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.cache.check import repair as check_repair
from cachefs.cache.check.directory import MOST_DETAILS, Report, check_directory
from cachefs.cache.check.slab import Problem
from cachefs.cache_dir.leftover import inspect_cache, remove_cache
from cachefs.cli import main
from cachefs.db import Database
from cachefs.errors import CacheDirError
from cachefs.format.index_record import (
    BLOCKS_TABLE,
    CLEAN_KEY,
    RECENCY_TABLE,
    SLABS_TABLE,
    STATE_TABLE,
    TABLES,
    TIER_KEY,
    decode_location,
    decode_slab_row,
    encode_location,
    encode_recency,
    encode_slab_key,
    encode_slab_row,
    pack_bitmap,
    unpack_bitmap,
)
from cachefs.format.paths import TierPaths
from cachefs.format.slab import decode_header, slab_layout, table_offset
from cachefs.types import ObjectRef
from tests.cache.harness import MIB, assert_right, open_tier, put_many, recount, serving
from tests.memory_origin import MemoryOrigin

SMALL, LARGE = 40, 8


async def fill(path: Path, crash: bool = False) -> tuple[MemoryOrigin, list[ObjectRef]]:
    """48 blocks in two classes, so in two slabs at least."""
    origin = MemoryOrigin()
    refs = put_many(origin, SMALL, 30_000) + put_many(origin, LARGE, 500_000, "g")
    async with serving(origin, open_tier(path), crash=crash) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
    return origin, refs


def slabs_of(path: Path) -> list[Path]:
    return sorted(TierPaths(path).slabs.glob("*.slab"))


def contents(path: Path) -> dict[str, str]:
    """Every file but the lock, and what is in it."""
    return {
        str(file.relative_to(path)): hashlib.sha1(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file() and file.name != "lock"
    }


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, length: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
    overwrite(path, offset, bytes(byte ^ 0xFF for byte in old))


def first_slot(slab: Path) -> int:
    header = decode_header(slab.read_bytes()[:4096])
    assert header is not None
    return slab_layout(header.class_index, header.slab_bytes).data_offset


def edit_index(path: Path, change: Callable[[Database], None]) -> None:
    database = Database.open(str(TierPaths(path).index), TABLES, 1 << 30)
    change(database)
    database.close()


async def assert_repaired(
    path: Path, origin: MemoryOrigin, refs: list[ObjectRef], expected_gets: int
) -> None:
    """The next check is clean, and a daemon finds nothing to complain of."""
    again = check_directory(path)
    assert not again.counts, again
    gets = origin.counters.gets
    async with serving(origin, open_tier(path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        counters = cache.status()[0].counters
        assert (counters.bad_blocks, counters.bad_slabs, counters.adopted) == (0, 0, 0)
        recount(cache)
    assert origin.counters.gets == gets + expected_gets


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of the index are in order, so no process needs to find that out."""
    monkeypatch.setattr("cachefs.cache.check.directory.refuse_unreadable", lambda *_: None)


@pytest.mark.usefixtures("readable")
async def test_a_directory_in_order_is_clean_and_stays_as_it_is(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    before = contents(tmp_path)
    steps: list[tuple[int, int]] = []
    for repair in (False, True):
        report = check_directory(tmp_path, repair, lambda *step: steps.append(step))
        assert (report.counts, report.clean, report.repaired) == ({}, True, False)
        assert (report.slabs, report.blocks) == (len(slabs_of(tmp_path)), SMALL + LARGE)
        assert report.block_bytes == SMALL * 30_000 + LARGE * 500_000
        assert steps[-1] == (report.slabs, report.slabs)
        assert contents(tmp_path) == before
    await assert_repaired(tmp_path, origin, refs, expected_gets=0)


async def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    async with serving(MemoryOrigin(), open_tier(tmp_path)):
        with pytest.raises(CacheDirError, match="in use by another cachefs"):
            check_directory(tmp_path, repair=True)


async def test_a_directory_in_use_is_refused_when_its_lock_file_is_gone(tmp_path: Path) -> None:
    async with serving(MemoryOrigin(), open_tier(tmp_path)):
        (tmp_path / "lock").unlink()
        with pytest.raises(CacheDirError, match="in use by another cachefs"):
            open_tier(tmp_path)
        (tmp_path / "lock").unlink()
        assert inspect_cache(tmp_path).in_use
        with pytest.raises(CacheDirError, match="in use by a daemon"):
            remove_cache(tmp_path)


def test_what_is_no_cache_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CacheDirError, match=r"is not a cache directory: no cachefs\.json"):
        check_directory(tmp_path, repair=True)
    with pytest.raises(CacheDirError, match="not a cache directory"):
        check_directory(tmp_path / "absent")
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_new_directory_is_clean(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    assert not check_directory(tmp_path, repair=True).counts


def _swap(path: Path) -> None:
    first, second = slabs_of(path)[:2]
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)


def _symlink(path: Path) -> None:
    slab = slabs_of(path)[0]
    slab.rename(path.parent / "elsewhere")
    slab.symlink_to(path.parent / "elsewhere")


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize(
    ("damage", "expected", "lost"),
    [
        (
            lambda path: flip(slabs_of(path)[0], first_slot(slabs_of(path)[0])),
            {Problem.BAD_BYTES: 1},
            1,
        ),
        (
            lambda path: flip(slabs_of(path)[0], table_offset(3), 3 * 32),
            {Problem.OTHER_KEY: 3},
            3,
        ),
        (
            lambda path: flip(slabs_of(path)[0], table_offset(3) + 24, 8),
            {Problem.OTHER_ENTRY: 1},
            1,
        ),
        (
            lambda path: flip(slabs_of(path)[0], 20),
            {Problem.BAD_HEADER: 1, Problem.NO_SLAB: SMALL},
            SMALL,
        ),
        (
            lambda path: os.truncate(slabs_of(path)[0], 0),
            {Problem.BAD_HEADER: 1, Problem.NO_SLAB: SMALL},
            SMALL,
        ),
        (
            lambda path: os.truncate(slabs_of(path)[0], first_slot(slabs_of(path)[0])),
            {Problem.WRONG_SIZE: 1, Problem.BAD_BYTES: SMALL},
            SMALL,
        ),
        (
            lambda path: os.truncate(slabs_of(path)[0], 4096 + 100),
            {Problem.WRONG_SIZE: 1, Problem.OTHER_KEY: SMALL - 3, Problem.BAD_BYTES: 3},
            SMALL,
        ),
        (
            lambda path: os.truncate(slabs_of(path)[0], 5 * MIB),
            {Problem.WRONG_SIZE: 1},
            0,
        ),
        (
            lambda path: slabs_of(path)[0].unlink(),
            {Problem.NO_FILE: 1, Problem.NO_SLAB: SMALL},
            SMALL,
        ),
        (_swap, {Problem.BAD_HEADER: 2, Problem.NO_SLAB: SMALL + 7}, SMALL + 7),
        (
            lambda path: shutil.copy(slabs_of(path)[1], slabs_of(path)[0]),
            {Problem.BAD_HEADER: 1, Problem.NO_SLAB: SMALL},
            SMALL,
        ),
        (
            lambda path: shutil.copy(slabs_of(path)[0], TierPaths(path).slab(77)),
            {Problem.BAD_HEADER: 1},
            0,
        ),
        (
            _symlink,
            {Problem.FOREIGN_FILE: 1, Problem.NO_SLAB: SMALL},
            SMALL,
        ),
    ],
    ids=[
        *["flipped byte", "flipped keys", "flipped checksum", "flipped header", "emptied"],
        *["cut before the slots", "cut in the table", "too long", "deleted", "swapped"],
        *["copied over another", "copied to a new name", "symlink"],
    ],
)
async def test_damaged_slabs(
    tmp_path: Path, damage: Callable[[Path], object], expected: dict[Problem, int], lost: int
) -> None:
    path = tmp_path / "cache"
    origin, refs = await fill(path)
    assert len(slabs_of(path)) == 3  # 40 small blocks in the first, 7 and 1 large ones
    damage(path)
    before = contents(path)
    report = check_directory(path)
    assert report.counts == expected
    assert report.blocks == SMALL + LARGE - lost
    assert all(0 < len(text) <= MOST_DETAILS for text in report.details.values())
    assert contents(path) == before
    repaired = check_directory(path, repair=True)
    assert repaired.counts == expected
    assert repaired.repaired
    assert repaired.blocks == SMALL + LARGE - lost
    assert not TierPaths(path).new_index.exists()
    await assert_repaired(path, origin, refs, expected_gets=lost)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("kind", ["name", "directory"])
async def test_files_of_others_are_named_and_left(tmp_path: Path, kind: str) -> None:
    await fill(tmp_path)
    name = "notes.txt" if kind == "name" else "000077.slab"
    place = TierPaths(tmp_path).slabs / name
    if kind == "name":
        place.write_text("dear diary")
    else:
        place.mkdir()
    report = check_directory(tmp_path, repair=True)
    assert report.counts == {Problem.FOREIGN_FILE: 1}
    assert report.left == [f"slabs/{name}"]
    assert place.exists()


def _delete(path: Path) -> None:
    shutil.rmtree(TierPaths(path).index)


def _empty(path: Path) -> None:
    os.truncate(TierPaths(path).index / "data.mdb", 0)


def _cut(path: Path) -> None:
    data = TierPaths(path).index / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)


def _garbage(path: Path) -> None:
    overwrite(TierPaths(path).index / "data.mdb", 0, os.urandom(8192))


def _zeroed_pages(path: Path) -> None:
    data = TierPaths(path).index / "data.mdb"
    overwrite(data, 8192, bytes(data.stat().st_size - 8192))


def _others(path: Path) -> None:
    edit_index(path, lambda database: database.put(STATE_TABLE, TIER_KEY, b"x" * 16))


def _file(path: Path) -> None:
    _delete(path)
    TierPaths(path).index.write_text("not a directory")


@pytest.mark.parametrize("damage", [_delete, _empty, _cut, _garbage, _zeroed_pages, _others, _file])
async def test_the_index_is_rebuilt_from_the_slabs_alone(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    origin, refs = await fill(tmp_path)
    damage(tmp_path)
    before = contents(tmp_path)
    report = check_directory(tmp_path)
    assert report.counts[Problem.BAD_INDEX] == 1
    assert (report.blocks, report.recoverable) == (0, SMALL + LARGE)
    assert contents(tmp_path) == before
    report = check_directory(tmp_path, repair=True)
    assert report.repaired
    assert report.blocks == report.recovered == SMALL + LARGE
    await assert_repaired(tmp_path, origin, refs, expected_gets=0)


async def test_a_page_that_leads_out_of_the_file_is_a_damaged_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that reads it may be killed for it: that is found, and survived."""
    await fill(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "killed"))
    (tmp_path / "killed").write_text("#!/bin/sh\nkill -BUS $$\n")
    (tmp_path / "killed").chmod(0o755)
    report = check_directory(tmp_path)
    assert report.details[Problem.BAD_INDEX] == ["its pages contradict each other"]


def _wrong_count(database: Database) -> None:
    for key, value in list(database.scan(SLABS_TABLE, b"")):
        row = decode_slab_row(value)
        assert row is not None
        database.put(SLABS_TABLE, key, encode_slab_row(row._replace(used_bytes=7)))


def _missing_bit(database: Database) -> None:
    key, value = next(database.scan(SLABS_TABLE, b""))
    row = decode_slab_row(value)
    assert row is not None
    bitmap = bytes([row.bitmap[0] & 0xFE]) + row.bitmap[1:]
    database.put(SLABS_TABLE, key, encode_slab_row(row._replace(bitmap=bitmap)))


def _wrong_class(database: Database) -> None:
    key, value = next(database.scan(SLABS_TABLE, b""))
    row = decode_slab_row(value)
    assert row is not None
    database.put(SLABS_TABLE, key, encode_slab_row(row._replace(class_index=3)))


def _no_row(database: Database) -> None:
    database.delete(SLABS_TABLE, bytes(4))


def _short_row(database: Database) -> None:
    database.put(SLABS_TABLE, bytes(4), b"x")


def _extra_row(database: Database) -> None:
    database.put(SLABS_TABLE, b"\0\0\0\x63", next(database.scan(SLABS_TABLE, b""))[1])


def _move(database: Database, **change: int) -> None:
    key, value = next(database.scan(BLOCKS_TABLE, b""))
    database.put(BLOCKS_TABLE, key, encode_location(decode_location(value)._replace(**change)))


def _double(database: Database) -> None:
    _, value = next(database.scan(BLOCKS_TABLE, b""))
    for key in (bytes(20), b"\xff" * 20):  # before and after the slot's own
        database.put(BLOCKS_TABLE, key, value)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize(
    ("change", "expected", "lost"),
    [
        (_wrong_count, {Problem.WRONG_COUNT: 3}, 0),
        (_missing_bit, {Problem.WRONG_COUNT: 1}, 0),
        (_wrong_class, {Problem.WRONG_ROW: 1}, 0),
        (_no_row, {Problem.NO_ROW: 1}, 0),
        (_short_row, {Problem.WRONG_ROW: 1}, 0),
        (_extra_row, {Problem.NO_FILE: 1}, 0),
        (lambda database: _move(database, slab=99), {Problem.NO_SLAB: 1}, 1),
        (lambda database: _move(database, slot=9999), {Problem.OUT_OF_BOUNDS: 1}, 1),
        (lambda database: _move(database, length=MIB), {Problem.OUT_OF_BOUNDS: 1}, 1),
        (lambda database: _move(database, checksum=0), {Problem.OUT_OF_BOUNDS: 1}, 1),
        (lambda database: _move(database, checksum=5), {Problem.BAD_BYTES: 1}, 1),
        (_double, {Problem.SHARED_SLOT: 2}, 0),
        (
            lambda database: database.put(BLOCKS_TABLE, bytes(20), b"short"),
            {Problem.OUT_OF_BOUNDS: 1},
            0,
        ),
    ],
)
async def test_a_damaged_row(
    tmp_path: Path, change: Callable[[Database], None], expected: dict[Problem, int], lost: int
) -> None:
    origin, refs = await fill(tmp_path)
    edit_index(tmp_path, change)
    report = check_directory(tmp_path)
    wrong_count = {Problem.WRONG_COUNT} - expected.keys()  # sums follow from the row
    assert {kind: n for kind, n in report.counts.items() if kind not in wrong_count} == expected
    assert check_directory(tmp_path, repair=True).blocks == SMALL + LARGE - lost
    await assert_repaired(tmp_path, origin, refs, expected_gets=lost)


@pytest.mark.usefixtures("readable")
async def test_blocks_that_a_crash_took_from_the_index(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path, crash=True)
    assert not TierPaths(tmp_path).bad_index.exists()
    report = check_directory(tmp_path)
    assert (report.clean, report.blocks, report.recoverable) == (False, 0, SMALL + LARGE)
    report = check_directory(tmp_path, repair=True)
    assert (report.repaired, report.recovered) == (True, SMALL + LARGE)
    await assert_repaired(tmp_path, origin, refs, expected_gets=0)


def _evict_one(database: Database) -> None:
    """What an eviction leaves: no row, no bit; bytes and slot table as they were."""
    key, value = next(database.scan(BLOCKS_TABLE, b""))
    location = decode_location(value)
    database.delete(BLOCKS_TABLE, key)
    slab_key = encode_slab_key(location.slab)
    row = decode_slab_row(database.get(SLABS_TABLE, slab_key) or b"")
    assert row is not None
    states = unpack_bitmap(row.bitmap, row.slot_count)
    states[location.slot] = 0
    row = row._replace(
        used_count=row.used_count - 1,
        used_bytes=row.used_bytes - location.length,
        bitmap=pack_bitmap(states),
    )
    database.put(SLABS_TABLE, slab_key, encode_slab_row(row))


@pytest.mark.usefixtures("readable")
async def test_evicted_blocks_are_not_brought_back(tmp_path: Path) -> None:
    origin, refs = await fill(tmp_path)
    edit_index(tmp_path, _evict_one)
    report = check_directory(tmp_path)
    assert not report.counts
    assert (report.blocks, report.recoverable) == (SMALL + LARGE - 1, 1)
    edit_index(tmp_path, _extra_row)
    report = check_directory(tmp_path, repair=True)
    assert (report.repaired, report.blocks, report.recovered) == (True, SMALL + LARGE - 1, 0)
    await assert_repaired(tmp_path, origin, refs, expected_gets=1)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("before_the_commit_point", [True, False])
async def test_a_repair_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_the_commit_point: bool
) -> None:
    """Killed beside the one rename that counts: everything of `finally` is skipped too."""
    origin, refs = await fill(tmp_path)
    flip(slabs_of(tmp_path)[0], first_slot(slabs_of(tmp_path)[0]))
    shutil.copy(slabs_of(tmp_path)[1], TierPaths(tmp_path).slab(77))
    real = check_repair.replace_database

    def crash(new: Path, old: Path) -> None:
        if before_the_commit_point:
            shutil.copytree(new, tmp_path / "left")
        else:
            real(new, old)
        raise KeyboardInterrupt

    monkeypatch.setattr(check_repair, "replace_database", crash)
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        check_directory(tmp_path, repair=True)
    monkeypatch.undo()
    if before_the_commit_point:
        (tmp_path / "left").rename(TierPaths(tmp_path).new_index)
        after = contents(tmp_path)
        assert {name: after[name] for name in before} == before
    report = check_directory(tmp_path, repair=True)
    assert report.counts[Problem.BAD_BYTES] == int(before_the_commit_point)
    assert report.counts[Problem.BAD_HEADER] == 1
    await assert_repaired(tmp_path, origin, refs, expected_gets=1)


@pytest.mark.usefixtures("readable")
async def test_recency_survives_a_repair(tmp_path: Path) -> None:
    await fill(tmp_path)

    def put(database: Database) -> None:
        for key, value in list(database.scan(SLABS_TABLE, b"")):
            row = decode_slab_row(value)
            assert row is not None
            ticks = array("I", range(row.slot_count))
            database.put(RECENCY_TABLE, key, encode_recency(row.class_index, ticks))
        database.put(RECENCY_TABLE, b"\0\0\0\x63", b"of a slab that is gone")

    edit_index(tmp_path, put)
    flip(slabs_of(tmp_path)[0], first_slot(slabs_of(tmp_path)[0]))
    assert check_directory(tmp_path, repair=True).repaired

    def look(database: Database) -> None:
        rows = dict(database.scan(SLABS_TABLE, b""))
        assert dict(database.scan(RECENCY_TABLE, b"")).keys() == rows.keys()
        assert database.get(STATE_TABLE, CLEAN_KEY) is not None

    edit_index(tmp_path, look)


async def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache"
    await fill(path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["check", *map(str, arguments)], standalone_mode=False)
        return code, *capsys.readouterr()

    held = "3 slabs, 48 blocks, 5 MiB"
    assert run(path) == (0, f"{path}: {held}: clean\n", "")
    flip(slabs_of(path)[0], 20)
    shutil.copy(slabs_of(path)[1], TierPaths(path).slab(77))
    code, out, _ = run(path)
    assert code == 1
    assert "42 problems; see cachefs check --repair" in out
    assert "  2 slabs whose header is damaged or another's\n    000000.slab\n" in out
    assert "    and 35 more\n" in out
    code, out, _ = run("--repair", path)
    assert code == 1
    assert "42 problems repaired" in out
    assert run(path)[0] == 0
    code, out, error = run(tmp_path / "absent", path)
    assert code == 1
    assert "absent is not a cache directory" in error
    assert out.endswith("clean\n")


def test_the_command_wants_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["check"])
    assert exited.value.code == 2
    assert "cachefs check --help" in capsys.readouterr().err


def test_a_report_keeps_few_details(tmp_path: Path) -> None:
    report = Report(tmp_path)
    for number in range(100):
        report.add(Problem.BAD_BYTES, str(number))
    assert report.counts[Problem.BAD_BYTES] == 100
    assert report.details[Problem.BAD_BYTES] == ["0", "1", "2", "3", "4"]
