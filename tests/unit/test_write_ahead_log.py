"""What a killed process has said is known to the next one (`db/write_ahead_log.py`)."""

import errno
import os
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from cachefs.db import Database
from cachefs.db.write_ahead_log import (
    LoggedChange,
    LogPosition,
    WriteAheadLog,
    read_write_ahead_log,
)
from tests.full_database import FullDatabase

TABLES = ("a", "b")
IDENTITY = 0xDEADBEEF
LOG_NAMES = ("journal.0", "journal.1")
ROW = ("b", b"journal")


def open_database(path: Path) -> tuple[Database, int]:
    database = Database.open(str(path), TABLES, 1 << 24)
    return database, database.recover(*ROW)


async def logging_database(path: Path) -> Database:
    database, _ = open_database(path)
    await database.commit()
    database.begin_write_ahead_log()
    return database


def rows(database: Database) -> dict[bytes, bytes]:
    return dict(database.scan("a", b""))


def left(path: Path, after: int, identity: int = IDENTITY) -> list[LoggedChange]:
    return read_write_ahead_log(path / "journal", LogPosition(identity, after))


def log_bytes(path: Path) -> int:
    return sum((path / name).stat().st_size for name in LOG_NAMES)


def test_the_bytes(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "journal", LogPosition(IDENTITY, 6))
    log.note(0, b"key", b"value")
    log.note(1, b"k", None)
    assert (tmp_path / "journal.0").read_bytes() == b""
    log.write_ahead()
    changes = bytes.fromhex("00 0300 05000000") + b"keyvalue"
    changes += bytes.fromhex("01 0100 ffffffff") + b"k"
    head = bytes.fromhex("0700000000000000 02000000 17000000")
    checksum = xxh3_64_intdigest(changes, IDENTITY).to_bytes(8, "little")
    assert (tmp_path / "journal.0").read_bytes() == head + checksum + changes
    assert (tmp_path / "journal.1").read_bytes() == b""
    assert left(tmp_path, 6) == [(0, b"key", b"value"), (1, b"k", None)]
    assert left(tmp_path, 7) == [(1, b"k", None)]
    assert left(tmp_path, 8) == []
    assert left(tmp_path, 5) == [], "number 6 is missing"
    assert left(tmp_path, 6, identity=7) == [], "another database's"
    assert (tmp_path / "journal.0").stat().st_mode & 0o777 == 0o600
    log.close(is_committed=True)
    assert list(tmp_path.iterdir()) == []


async def test_what_was_logged_survives_and_what_was_not_is_lost(tmp_path: Path) -> None:
    database = await logging_database(tmp_path)
    database.put("a", b"1", b"committed")
    database.put("a", b"2", b"committed")
    await database.commit()
    database.put("a", b"2", b"logged")
    database.delete("a", b"1")
    database.put_all("a", {b"3": b"logged"})
    database.write_ahead()
    database.put("a", b"4", b"not logged")
    database.abandon()
    database, recovered = open_database(tmp_path)
    assert recovered == 3
    assert rows(database) == {b"2": b"logged", b"3": b"logged"}
    database.abandon()
    # Killed again before that was committed: it is still there.
    database, recovered = open_database(tmp_path)
    assert recovered == 3
    await database.commit()
    database.abandon()
    database, recovered = open_database(tmp_path)
    assert recovered == 0
    assert rows(database) == {b"2": b"logged", b"3": b"logged"}
    database.abandon()


@pytest.mark.parametrize("kills", [1, 3])
async def test_changes_during_a_commit_and_several_kills(tmp_path: Path, kills: int) -> None:
    expected = {}
    for kill in range(kills):
        database = await logging_database(tmp_path)
        for number in range(20):
            key, value = b"%d" % (number % 7), b"%d of %d" % (number, kill)
            database.put("a", key, value)
            database.write_ahead()
            expected[key] = value
            if number % 5 == 2:
                await database.commit()
        database.abandon()
    database, _ = open_database(tmp_path)
    assert rows(database) == expected
    database.abandon()


async def test_the_files_stay_small_and_go_with_a_clean_end(tmp_path: Path) -> None:
    database = await logging_database(tmp_path)
    sizes = []
    for number in range(10):
        database.put("a", b"key", b"x" * 1000)
        database.write_ahead()
        await database.commit()
        sizes.append(log_bytes(tmp_path))
        assert database.get("a", b"key") == b"x" * 1000, number
    assert max(sizes) < 3000
    database.close()
    assert not any((tmp_path / name).exists() for name in LOG_NAMES)
    database, recovered = open_database(tmp_path)
    assert recovered == 0
    database.abandon()


async def test_an_old_file_that_a_power_cut_brings_back_changes_nothing(tmp_path: Path) -> None:
    database = await logging_database(tmp_path)
    database.put("a", b"key", b"old")
    database.write_ahead()
    brought_back = [(tmp_path / name).read_bytes() for name in LOG_NAMES]
    await database.commit()
    database.put("a", b"key", b"new")
    database.write_ahead()
    await database.commit()
    database.abandon()
    for name, data in zip(LOG_NAMES, brought_back, strict=True):
        (tmp_path / name).write_bytes(data)
    database, recovered = open_database(tmp_path)
    assert recovered == 0
    assert rows(database) == {b"key": b"new"}
    database.abandon()


@pytest.mark.parametrize("keep", range(0, 112, 7))
async def test_a_torn_file_is_read_as_far_as_it_is_whole(tmp_path: Path, keep: int) -> None:
    database = await logging_database(tmp_path)
    for number in range(3):
        database.put("a", b"%d" % number, b"value")
        database.write_ahead()
    database.abandon()
    (path,) = (tmp_path / n for n in LOG_NAMES if (tmp_path / n).stat().st_size)
    data = path.read_bytes()
    assert len(data) == 111
    batch_bytes = len(data) // 3
    path.write_bytes(data[:keep] + bytes(len(data) - keep))
    database, recovered = open_database(tmp_path)
    assert recovered == min(3, keep // batch_bytes)
    database.abandon()


@pytest.mark.expect_log("if the daemon dies now")
async def test_a_full_disk_costs_what_a_kill_would_have_cost_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await logging_database(tmp_path)
    database.put("a", b"1", b"logged")
    database.write_ahead()
    writev = os.writev

    def full(fd: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    for _ in range(3):
        database.put("a", b"2", b"lost")
        database.write_ahead()
    monkeypatch.setattr(os, "writev", writev)
    database.put("a", b"3", b"lost, too: what came before it is missing")
    database.write_ahead()
    assert left(tmp_path, 0, database._position().identity) == [(0, b"1", b"logged")]
    await database.commit()
    database.put("a", b"4", b"logged")
    database.write_ahead()
    database.abandon()
    database, recovered = open_database(tmp_path)
    assert recovered == 1
    assert set(rows(database)) == {b"1", b"2", b"3", b"4"}
    database.abandon()


async def test_without_a_log_nothing_is_written(tmp_path: Path) -> None:
    database, _ = open_database(tmp_path)
    database.put("a", b"1", b"x")
    database.write_ahead()
    await database.commit()
    assert not any((tmp_path / name).exists() for name in LOG_NAMES)
    database.close()


# -- what can't be committed ---------------------------------------------------------------------


@pytest.mark.expect_log("can't write the database")
@pytest.mark.parametrize("kills", [1, 3])
async def test_a_log_is_not_emptied_before_its_changes_are_committed(
    tmp_path: Path, full_database: FullDatabase, kills: int
) -> None:
    database = await logging_database(tmp_path)
    expected = {}
    full_database.is_full = True
    for kill in range(kills):
        for number in range(20):
            key, value = b"%d" % (number % 7), b"%d of %d" % (number, kill)
            database.put("a", key, value)
            database.write_ahead()
            expected[key] = value
            if number % 9 == 2:
                assert not await database.commit()
        database.delete("a", b"3")
        database.write_ahead()
        del expected[b"3"]
        database.abandon()
        database = await logging_database(tmp_path)
        assert rows(database) == expected
    full_database.is_full = False
    assert await database.commit()
    database.abandon()
    database, recovered = open_database(tmp_path)
    assert (recovered, rows(database)) == (0, expected)
    database.abandon()


@pytest.mark.expect_log("can't write the database")
async def test_without_one_commit_there_is_no_log_yet(
    tmp_path: Path, full_database: FullDatabase
) -> None:
    full_database.is_full = True
    database = await logging_database(tmp_path)
    database.put("a", b"1", b"x")
    assert database.logged("a", b"1") is None
    assert not (tmp_path / "journal.0").exists()
    full_database.is_full = False
    assert await database.commit()
    full_database.is_full = True
    database.put("a", b"2", b"x")
    assert database.logged("a", b"1") == database.logged("a", b"2") == b"x"
    database.abandon()
    database, recovered = open_database(tmp_path)
    assert (recovered, set(rows(database))) == (1, {b"1", b"2"})
    database.abandon()


@pytest.mark.expect_log("can't write|if the daemon dies now")
async def test_what_is_kept(
    tmp_path: Path, full_database: FullDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await logging_database(tmp_path)
    database.put("a", b"1", b"logged")
    assert database.logged("a", b"1") == b"logged"
    full_database.is_full = True
    with monkeypatch.context() as full:
        full.setattr(os, "writev", lambda fd, buffers: 0)
        database.put("a", b"1", b"neither")
        assert database.logged("a", b"1") is None, "only what is committed counts now"
    assert not await database.commit()
    database.put("a", b"2", b"written, but what came before it is missing")
    assert database.logged("a", b"2") is None
    full_database.is_full = False
    assert await database.commit()
    assert database.logged("a", b"1") == b"neither"
    assert database.logged("a", b"2") is not None
    database.close()
