"""The overlay over LMDB: reads see every write at once, crashes lose what no commit wrote."""

import logging
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.db import Changes, Database
from cachefs.errors import CacheDirError

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

    def _write(self, batch: dict[str, Changes]) -> None:
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
    logging.getLogger("cachefs.db").disabled = True  # the failing commits warn, as they should
    try:
        trio.run(_run, tmp_path_factory.mktemp("db"), operations)
    finally:
        logging.getLogger("cachefs.db").disabled = False


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    db = opened(tmp_path)
    real = db._write

    def full(batch: dict[str, Changes]) -> None:
        raise lmdb.MapFullError("no space left")

    monkeypatch.setattr(db, "_write", full)
    db.put("one", b"a", b"1")
    db.put("one", b"b", b"1")
    for _ in range(3):
        await db.commit()
    db.put("one", b"a", b"2")
    db.delete("one", b"b")
    await db.commit()
    assert db.get("one", b"a") == b"2"
    assert list(db.scan("one", b"")) == [(b"a", b"2")]
    assert [record.name for record in caplog.records] == ["cachefs.db"]

    monkeypatch.setattr(db, "_write", real)
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
