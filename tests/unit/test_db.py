"""The overlay over LMDB: reads see every write at once, crashes lose what no commit wrote."""

import contextlib
import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import lmdb
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.db import (
    ChangedRows,
    DamagedDatabaseError,
    Database,
    DatabaseBuilder,
    DatabaseReader,
    copy_suspect,
    database_exists,
    replace_database,
    residency,
)
from cachefs.db.mapping import cold_share, unmap_pages
from cachefs.db.read_through import refuse_unreadable
from cachefs.db.row_sums import sealed, seed_of, stored_name, unsealed
from cachefs.errors import CacheDirError
from tests.full_database import FullDatabase

MAP_BYTES = 1 << 26
TABLES = ("one", "two")


def opened(path: Path) -> Database:
    return Database.open(str(path), TABLES, MAP_BYTES)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = opened(tmp_path / "db")
    yield database
    database.abandon()


KEYS = st.binary(min_size=1, max_size=3).map(lambda raw: bytes(byte % 3 for byte in raw))
"""Few keys, many of which are prefixes of others: collisions are wanted."""

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(TABLES), KEYS, st.binary(max_size=2)),
        st.tuples(st.just("delete"), st.sampled_from(TABLES), KEYS),
        st.tuples(st.just("commit")),
        st.tuples(st.just("failing commit")),
        st.tuples(st.just("write during commit"), st.sampled_from(TABLES), KEYS),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("crash")),
        st.tuples(st.just("scan"), st.sampled_from(TABLES), st.just(b"") | KEYS, st.none() | KEYS),
    ),
    max_size=40,
)


class _Broken(Database):
    """A database whose disk can be full, or whose commits let others write meanwhile."""

    failing = False

    def _write(self, batch: dict[str, ChangedRows]) -> None:
        if self.failing:
            raise lmdb.MapFullError("full")
        super()._write(batch)


async def _run(path: Path, operations: list[tuple]) -> None:
    db = _Broken.open(str(path), TABLES, MAP_BYTES)
    now: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
    committed: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
    try:
        for operation, *arguments in operations:
            match operation, arguments:
                case "put", (table, key, value):
                    db.put(table, key, value)
                    now[table][key] = value
                case "delete", (table, key):
                    db.delete(table, key)
                    now[table].pop(key, None)
                case "commit", ():
                    await db.commit()
                    committed = {name: dict(rows) for name, rows in now.items()}
                    assert db.pending_count == 0
                case "failing commit", ():
                    db.failing = True
                    before = db.pending_count
                    await db.commit()
                    db.failing = False
                    assert db.pending_count == before
                case "write during commit", (table, key):
                    committed = {name: dict(rows) for name, rows in now.items()}
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(db.commit)
                        await trio.lowlevel.checkpoint()
                        db.put(table, key, b"meanwhile")
                        now[table][key] = b"meanwhile"
                        assert db.get(table, key) == b"meanwhile"
                    # The commit may have begun before or after our write.
                    if db.pending_count == 0:
                        committed = {name: dict(rows) for name, rows in now.items()}
                case "reopen", ():
                    db.close()
                    db = _Broken.open(str(path), TABLES, MAP_BYTES)
                    committed = {name: dict(rows) for name, rows in now.items()}
                case "crash", ():
                    db.abandon()
                    db = _Broken.open(str(path), TABLES, MAP_BYTES)
                    now = {name: dict(rows) for name, rows in committed.items()}
                case "scan", (table, prefix, start):
                    wanted = [
                        (key, value)
                        for key, value in sorted(now[table].items())
                        if key.startswith(prefix) and (start is None or key >= start)
                    ]
                    assert list(db.scan(table, prefix, start)) == wanted
            for table in TABLES:
                assert dict(db.scan(table, b"")) == now[table]
                assert all(db.get(table, key) == value for key, value in now[table].items())
                assert db.get(table, b"absent") is None
    finally:
        db.abandon()


@given(operations=OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_random_operations_match_a_dict(
    operations: list[tuple], tmp_path_factory: pytest.TempPathFactory
) -> None:
    logging.getLogger(
        "cachefs.db.database"
    ).disabled = True  # the failing commits warn, as they should
    try:
        trio.run(_run, tmp_path_factory.mktemp("db"), operations)
    finally:
        logging.getLogger("cachefs.db.database").disabled = False


async def test_a_crash_keeps_exactly_what_was_committed(tmp_path: Path) -> None:
    db = opened(tmp_path)
    db.put("one", b"a", b"1")
    db.put("one", b"b", b"1")
    await db.commit()
    db.put("one", b"a", b"2")
    db.delete("one", b"b")
    db.put("one", b"c", b"2")
    assert list(db.scan("one", b"")) == [(b"a", b"2"), (b"c", b"2")]
    assert db.pending_count == 3
    db.abandon()
    again = opened(tmp_path)
    assert list(again.scan("one", b"")) == [(b"a", b"1"), (b"b", b"1")]
    again.abandon()


def test_close_commits(tmp_path: Path) -> None:
    db = opened(tmp_path)
    db.put("two", b"a", b"1")
    db.close()
    again = opened(tmp_path)
    assert again.get("two", b"a") == b"1"
    again.abandon()


@pytest.mark.expect_log("can't write the database")
async def test_a_failing_commit_keeps_the_changes_and_warns_once(
    tmp_path: Path, full_database: FullDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    db = opened(tmp_path)
    full_database.is_full = True
    db.put("one", b"a", b"1")
    db.put("one", b"b", b"1")
    for _ in range(3):
        await db.commit()
    db.put("one", b"a", b"2")
    db.delete("one", b"b")
    await db.commit()
    assert db.get("one", b"a") == b"2"
    assert list(db.scan("one", b"")) == [(b"a", b"2")]
    assert [record.name for record in caplog.records] == ["cachefs.db.database"]

    full_database.is_full = False
    await db.commit()
    assert db.pending_count == 0
    db.abandon()
    again = opened(tmp_path)
    assert list(again.scan("one", b"")) == [(b"a", b"2")]
    again.abandon()


async def test_a_cancelled_commit_loses_nothing(db: Database) -> None:
    db.put("one", b"a", b"1")
    with trio.CancelScope() as scope:
        scope.cancel()
        await db.commit()
    assert db.get("one", b"a") == b"1"
    await db.commit()
    assert db.pending_count == 0
    assert db.get("one", b"a") == b"1"


async def test_a_commit_finds_a_thread_when_all_others_hang(db: Database) -> None:
    released = threading.Event()
    count = int(trio.to_thread.current_default_thread_limiter().total_tokens)
    db.put("one", b"key", b"value")
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(trio.to_thread.run_sync, released.wait)
        await trio.testing.wait_all_tasks_blocked()
        try:
            with trio.fail_after(300):
                await db.commit()
        finally:
            released.set()
    assert db.pending_count == 0


async def test_changes_made_while_a_commit_runs_win_and_stay_pending(db: Database) -> None:
    db.put("one", b"a", b"old")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(db.commit)
        await trio.testing.wait_all_tasks_blocked()
        db.put("one", b"a", b"new")
        assert db.get("one", b"a") == b"new"
        assert list(db.scan("one", b"")) == [(b"a", b"new")]
    assert db.pending_count == 1
    assert db.get("one", b"a") == b"new"


async def test_the_commit_loop_commits_every_second(
    db: Database, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []

    async def commit() -> None:
        times.append(trio.current_time())

    monkeypatch.setattr(db, "commit", commit)
    began = trio.current_time()
    with trio.move_on_after(3.5):
        await db.commit_loop()
    assert [time - began for time in times] == [1, 2, 3]


def test_a_place_that_cant_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheDirError, match=r"can.t open the database .*file"):
        opened(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"


def filled(path: Path, count: int = 3000) -> dict[bytes, bytes]:
    rows = {number.to_bytes(4, "big"): b"value" * 5 for number in range(count)}
    database = opened(path)
    for key, value in rows.items():
        database.put("one", key, value)
    database.close()
    return rows


@pytest.mark.parametrize("left", [1, 100, 4096, 5000, 8192, 12288, -1])
def test_a_file_that_was_cut_is_refused_and_not_touched(tmp_path: Path, left: int) -> None:
    """LMDB alone would be killed by SIGBUS."""
    filled(tmp_path)
    file = tmp_path / "data.mdb"
    os.truncate(file, left if left > 0 else file.stat().st_size - 1)
    before = file.read_bytes()
    with pytest.raises(DamagedDatabaseError, match=r"database .* is damaged .*remove it"):
        opened(tmp_path)
    with pytest.raises(DamagedDatabaseError):
        DatabaseReader(tmp_path, TABLES)
    assert file.read_bytes() == before


def test_garbage_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / "data.mdb").open("r+b") as file:
        file.write(b"garbage " * 1024)
    with pytest.raises(DamagedDatabaseError):
        opened(tmp_path)


def test_a_damaged_row_is_found_when_reading_through(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / "data.mdb"
    size_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:8192].ljust(size_bytes, b"\0"))
    with pytest.raises(DamagedDatabaseError):
        opened(tmp_path).read_through("one")
    with pytest.raises(DamagedDatabaseError):
        list(DatabaseReader(tmp_path, TABLES).scan("one"))


def test_a_check_that_can_not_be_made_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ends with 1 if, for example, there is no memory."""
    filled(tmp_path)
    refuse_unreadable(tmp_path, TABLES)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback: >&2\necho MemoryError >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CacheDirError, match="can't be checked: MemoryError") as caught:
        refuse_unreadable(tmp_path, TABLES)
    assert not isinstance(caught.value, DamagedDatabaseError)


def test_a_database_that_can_not_be_opened_is_not_readable(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "data.mdb").rename(tmp_path / "moved")
    (tmp_path / "data.mdb").mkdir()
    with pytest.raises(CacheDirError, match="can't be checked"):
        refuse_unreadable(tmp_path, TABLES)


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    filled(tmp_path)
    os.truncate(tmp_path / "data.mdb", 0)
    assert not database_exists(tmp_path)
    database = opened(tmp_path)
    database.read_through("one")
    assert list(database.scan("one", b"")) == []
    database.abandon()


def test_warming_reads_the_file_within_its_limit(tmp_path: Path) -> None:
    filled(tmp_path)
    size_bytes = (tmp_path / "data.mdb").stat().st_size
    database = opened(tmp_path)
    assert database.residency.warm() == size_bytes
    assert database.residency.warm(limit_bytes=10_000) == 10_000
    database.abandon()
    assert database.residency.warm() == size_bytes  # a thread that outlives the daemon harms nobody
    (tmp_path / "data.mdb").unlink()
    assert database.residency.warm() == 0


def test_a_reader_leaves_no_trace(tmp_path: Path) -> None:
    rows = filled(tmp_path)
    before = (tmp_path / "data.mdb").read_bytes()
    reader = DatabaseReader(tmp_path, (*TABLES, "new"))
    assert dict(reader.scan("one")) == rows
    assert list(reader.scan("two")) == list(reader.scan("new")) == []
    assert reader.get("one", b"\0\0\0\1") == rows[b"\0\0\0\1"]
    assert reader.get("new", b"a") is None
    reader.close()
    assert [file.name for file in tmp_path.iterdir()] == ["data.mdb"]
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_table_added_later_is_created(tmp_path: Path) -> None:
    Database.open(str(tmp_path), ("one",), MAP_BYTES).close()
    database = opened(tmp_path)
    database.put("two", b"a", b"1")
    database.close()
    reader = DatabaseReader(tmp_path, TABLES)
    assert list(reader.scan("two")) == [(b"a", b"1")]
    reader.close()


def test_a_database_built_anew_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.db.offline._BUILD_ROWS", 7)
    filled(tmp_path / "old")
    builder = DatabaseBuilder(tmp_path / "new", TABLES, MAP_BYTES)
    for number in range(100):
        assert builder.put("two", b"%d" % (number * 37 % 100), b"1")
    assert not builder.put("two", b"5", b"2")
    builder.finish()
    replace_database(tmp_path / "new", tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"]
    database = opened(tmp_path / "old")
    assert list(database.scan("one", b"")) == []
    assert dict(database.scan("two", b"")) == {b"%d" % number: b"1" for number in range(100)}
    database.abandon()


@pytest.mark.expect_log("is damaged .*restart it")
async def test_damage_met_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows out of reach are missing, new ones are seen, and the next start knows of it."""
    rows = filled(tmp_path)
    database = opened(tmp_path)
    file = tmp_path / "data.mdb"
    with file.open("r+b") as raw:  # what LMDB has mapped
        raw.seek(8192)
        raw.write(bytes(file.stat().st_size - 8192))
    for key in rows:
        assert database.get("one", key) is None
    assert list(database.scan("one", b"")) == []
    database.put("one", b"new", b"1")
    await database.commit()
    assert list(database.scan("one", b"")) == [(b"new", b"1")]
    database.close()
    assert len(caplog.records) == 1
    with pytest.raises(DamagedDatabaseError, match="could not be read"):
        opened(tmp_path)


def test_many_rows_at_once_are_found_in_order_between_others(db: Database) -> None:
    db.put("one", b"b", b"1")
    assert len(list(db.scan("one", b""))) == 1
    db.put_all("one", {b"c": b"2", b"a": b"3", b"b": b"4"})
    db.put("one", b"aa", b"5")
    assert list(db.scan("one", b"")) == [(b"a", b"3"), (b"aa", b"5"), (b"b", b"4"), (b"c", b"2")]


async def test_a_snapshot_does_not_change(db: Database) -> None:
    db.put("one", b"a", b"1")
    await db.commit()
    db.put("one", b"b", b"not committed")
    snapshot = db.snapshot()
    db.put("one", b"a", b"2")
    await db.commit()
    assert (snapshot.get("one", b"a"), snapshot.get("one", b"b")) == (b"1", None)
    assert list(snapshot.scan("one", b"")) == [(b"a", b"1")]
    assert list(snapshot.scan("one", b"b")) == []
    assert snapshot.count("one") == 1
    snapshot.close()


async def test_pages_that_were_read_are_given_back(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    rows = {b"%06d" % number: bytes(1000) for number in range(10_000)}
    with open_again(tmp_path / "db", rows) as db:
        assert len(list(db.scan("one", b""))) == len(rows)
        assert mapped_of(tmp_path / "db") > 5_000_000
        with trio.move_on_after(1.5):
            await db.residency.keep_small(most_bytes=0)
        assert mapped_of(tmp_path / "db") < 1_000_000
        assert dict(db.scan("one", b"")) == rows


@contextlib.contextmanager
def open_again(path: Path, rows: dict[bytes, bytes]) -> Iterator[Database]:
    first = opened(path)
    first.put_all("one", rows)
    first.close()
    again = opened(path)
    yield again
    again.abandon()


def mapped_of(path: Path) -> int:
    """Bytes of the database's mapping that stand in this process's memory."""
    found = re.findall(
        rf"{re.escape(str(path))}/data.mdb\n(?:\w+: .*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
    )
    return sum(map(int, found)) * 1024


def forget_pages(data: Path) -> None:
    """What a kernel does that needs the memory for others."""
    unmap_pages(data)
    with data.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def test_cold_rows_are_brought_into_memory_by_threads(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    keys = [number.to_bytes(4, "big") for number in range(20_000)]
    db.put_all("one", {key: bytes(100) for key in keys})
    await db.commit()
    await db.residency.measure()
    assert not db.residency.is_cold
    forget_pages(tmp_path / "db/data.mdb")
    await db.residency.measure()
    assert db.residency.is_cold
    faults = 0
    for key in keys[::100]:
        await db.residency.bring(lambda get, key=key: get("one", key))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        assert db.get("one", key) == bytes(100)
        faults += resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before
    assert faults < 50, "200 without; the machine may have some of its own"
    db.close()
    await db.residency.bring(lambda get: get("one", keys[0]))  # too late, and no harm


async def test_a_cold_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_KEEP_WARM_INTERVAL_S", 0.01)
    data = tmp_path / "db/data.mdb"
    db = opened(tmp_path / "db")
    db.put_all("one", {number.to_bytes(4, "big"): bytes(100) for number in range(20_000)})
    await db.commit()
    forget_pages(data)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(db.residency.keep_warm)
        with trio.fail_after(300):
            while cold_share(data) > 0.01:  # noqa: ASYNC110 - it has no event
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    db.close()


@pytest.mark.expect_log("can't be read: Input/output error")
def test_a_database_that_the_disk_can_not_read_is_marked(tmp_path: Path) -> None:
    """Before anybody maps it: that would kill the process."""
    path = tmp_path / "db"
    path.mkdir()
    (path / "data.mdb").symlink_to("/proc/self/mem")  # address 0 can't be read
    copy_suspect(path, TABLES, has_crashed=True)
    with pytest.raises(DamagedDatabaseError, match="could not be read"):
        opened(path)


def test_after_a_crash_the_rows_are_copied(tmp_path: Path) -> None:
    rows = filled(tmp_path)
    before = (tmp_path / "data.mdb").stat()
    copy_suspect(tmp_path, TABLES, has_crashed=False)
    assert (tmp_path / "data.mdb").stat().st_ino == before.st_ino  # a usual start reads nothing
    copy_suspect(tmp_path, TABLES, has_crashed=True)
    assert (tmp_path / "data.mdb").stat().st_ino != before.st_ino
    assert sorted(os.listdir(tmp_path)) == ["data.mdb"]
    database = opened(tmp_path)
    assert dict(database.scan("one", b"")) == rows
    database.close()


def test_nothing_to_check_is_no_trouble(tmp_path: Path) -> None:
    copy_suspect(tmp_path / "missing", TABLES, has_crashed=True)
    filled(tmp_path)
    os.truncate(tmp_path / "data.mdb", 0)
    copy_suspect(tmp_path, TABLES, has_crashed=True)
    opened(tmp_path).close()


@pytest.mark.expect_log("is damaged: its pages contradict each other")
def test_a_database_that_kills_its_reader_is_marked(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in range(2, len(data) // 4096):  # nodes that begin far behind the end of their page
        if data[page * 4096 + 10] & 2:
            data[page * 4096 + 16 : page * 4096 + 100] = b"\xf0\xff" * 42
    file.write_bytes(data)
    copy_suspect(tmp_path, TABLES, has_crashed=True)
    with pytest.raises(DamagedDatabaseError, match="could not be read"):
        opened(tmp_path)


def flip(file: Path, old: bytes, *, count: int = 1) -> None:
    """Flip one bit in the last byte of each place with these bytes."""
    data = file.read_bytes()
    assert data.count(old) >= count
    file.write_bytes(data.replace(old, old[:-1] + bytes([old[-1] ^ 1])))


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.expect_log("a row of one has a wrong checksum")
async def test_a_row_with_a_flipped_bit_counts_as_missing(tmp_path: Path, what: str) -> None:
    database = opened(tmp_path)
    for number in range(100):
        database.put("one", b"key%03d" % number, b"value%03d" % number)
    database.close()
    flip(tmp_path / "data.mdb", b"%s050" % what.encode())
    database = opened(tmp_path)
    lost: list[tuple[str, bytes]] = []
    database.on_bad_row = lambda table, key: lost.append((table, key))
    rows = dict(database.scan("one", b""))
    assert rows == {b"key%03d" % n: b"value%03d" % n for n in range(100) if n != 50}
    assert lost == [("one", b"key051" if what == "key" else b"key050")]
    assert dict(database.scan("one", b"")) == rows
    assert database.get("one", b"key050") is None
    assert database.bad_rows == 1
    database.close()
    # The next start reads all of it first, and the copy has no such row.
    assert (tmp_path / "suspect").exists()
    copy_suspect(tmp_path, TABLES, has_crashed=False)
    assert not (tmp_path / "suspect").exists()
    reader = DatabaseReader(tmp_path, TABLES)
    assert dict(reader.scan("one")) == rows
    assert reader.bad_rows == 0
    reader.close()


def test_the_checksum_of_a_row() -> None:
    """Golden bytes: docs/formats/database.md."""
    seed = seed_of("inodes")
    assert stored_name("inodes") == b"inodes+"
    assert sealed(seed, b"key", b"value").hex() == "76616c7565a2d7823b"
    assert unsealed(seed, b"key", sealed(seed, b"key", b"value")) == b"value"
    assert unsealed(seed_of("times"), b"key", sealed(seed, b"key", b"value")) is None
    assert unsealed(seed, b"key", b"abc") is None


def test_a_database_of_an_older_version_is_refused(tmp_path: Path) -> None:
    """Its rows have no checksums."""
    with lmdb.open(str(tmp_path), max_dbs=3) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"1", db=env.open_db(b"two", txn=txn))
    for open_it in (opened, partial(DatabaseReader, tables=TABLES)):
        with pytest.raises(DamagedDatabaseError, match="an older version"):
            open_it(tmp_path)
