"""An ordered key-value store on LMDB whose writes take no time on the event loop.

Writes go to a dict, and reads see them at once. About once a second a worker thread writes the
dict as one LMDB transaction with fsync. This transaction is the only commit point: a crash or a
power cut loses the writes since then, and nothing else.

Concurrency: methods run on the loop thread, except `_write` and those of `Residency`, which run in
worker threads. `_write` uses only the frozen batch and its own write transaction. Between two
awaits a caller sees no changes but its own.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import lmdb
import trio
from xxhash import xxh32_digest

from cachefs.db.environment import (
    DAMAGE,
    DATA_NAME,
    MARK_NAME,
    SUSPECT_NAME,
    explained,
    open_env,
    refuse_older,
)
from cachefs.db.pending_changes import ChangedRows, PendingChanges, merged
from cachefs.db.residency import Residency
from cachefs.db.row_sums import SUM_BYTES, sealed, seed_of, stored_name, unsealed
from cachefs.db.snapshot import DatabaseSnapshot
from cachefs.db.write_ahead_log import (
    LoggedChange,
    LogPosition,
    WriteAheadLog,
    read_write_ahead_log,
)

log = logging.getLogger(__name__)

_MUCH_PENDING = 100_000
_MOST_READ_BACK = 5_000
"""Numbers of changes."""


class Database:
    """A set of named tables in one directory. See the module docstring for its guarantees.

    `get`, `scan`, `logged` and `last_key` never raise LMDB's errors: an unreadable row counts as
    missing, and from then on so do all rows on disk (see `_meet_damage`). A row with a wrong
    checksum counts as missing (see `_meet_bad_row`).
    """

    def __init__(self, path: str, env: lmdb.Environment, tables: Sequence[str]) -> None:
        self._env = env
        self._path = path
        self._data_path = Path(path) / DATA_NAME
        self._handles = {name: env.open_db(stored_name(name)) for name in tables}
        self._seeds = {name: seed_of(name) for name in tables}
        self._pending = {name: PendingChanges() for name in tables}
        self._reader = env.begin()
        self._commit_lock = trio.Lock()
        # Commits have their own thread, so that they never wait for other work that hangs.
        self._commit_thread = trio.CapacityLimiter(1)
        self.residency = Residency(env, self._handles, self._data_path)
        self._failing = False
        self._damage: lmdb.Error | MemoryError | None = None
        """The first LMDB error for a row that could not be read."""
        self.bad_rows = 0
        """The number of rows that counted as missing because of damage."""
        self._bad_tables: set[str] = set()
        self._bad_keys: set[tuple[str, bytes]] = set()
        """The tables of these rows, and those and the keys of rows with a wrong checksum."""
        self.on_bad_row: Callable[[str, bytes], None] = lambda table, key: None
        """Called on the loop with the table and the key of each row whose checksum was wrong, once.
        The key may be wrong, too."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called on the loop just before a batch is frozen, with no await between: the rows that
        it puts are part of the batch. For rows that would cost too much to put at every change."""
        self._wal: WriteAheadLog | None = None
        self._position_row = ("", b"")
        """Table and key of the row that has the `LogPosition`."""
        self._wal_stem = self._data_path.with_name("journal")
        self._wants_wal = False
        self._table_numbers = {name: number for number, name in enumerate(tables)}

    @classmethod
    def open(cls, path: str, tables: Sequence[str], map_size_bytes: int) -> "Database":
        """Open the database in the directory `path`, or create it.

        `map_size_bytes` is the greatest size of the file; it costs address space only. Raises
        `DamagedDatabaseError` if the file is no database or is incomplete, and `CacheDirError` if
        the directory can't be written or contains something else.
        """
        with explained(path):
            Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
            env = open_env(path, max_dbs=len(tables), map_size=map_size_bytes, mode=0o600)
            try:
                refuse_older(path, env, tables)
                return cls(path, env, tables)
            except BaseException:
                env.close()
                raise

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value, pending changes included; None if there is no such row."""
        changes = self._pending[table]
        if key in changes.pending:
            return changes.pending[key]
        if key in changes.flushing:
            return changes.flushing[key]
        try:  # the code of `_committed` and `unsealed`, repeated for speed
            stored: bytes | None = self._reader.get(key, db=self._handles[table])
        except (lmdb.Error, MemoryError) as error:
            self._meet_damage(error)
            return None
        if stored is None:
            return None
        value = stored[:-SUM_BYTES]
        if stored[-SUM_BYTES:] != xxh32_digest(key + value, self._seeds[table]):
            self._meet_bad_row(table, key)
            return None
        return value

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Insert or replace a row. The next commit makes it durable."""
        self._pending[table].write(key, value)
        if self._wal is not None:
            self._wal.note(self._table_numbers[table], key, value)

    def put_all(self, table: str, rows: Mapping[bytes, bytes]) -> None:
        """Do the same as `put` for many rows; this is cheaper."""
        self._pending[table].write_all(rows)
        if self._wal is not None:
            for key, value in rows.items():
                self._wal.note(self._table_numbers[table], key, value)

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row, if it exists. The next commit makes this durable."""
        self._pending[table].write(key, None)
        if self._wal is not None:
            self._wal.note(self._table_numbers[table], key, None)

    def scan(
        self, table: str, prefix: bytes, start: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the rows whose key begins with `prefix` and is not less than `start`.

        Rows come in key order; pending changes are included. The iterator is invalid after the
        next await or write.
        """
        first = max(start or prefix, prefix)
        changes = self._pending[table].changes_from(first, prefix)
        return merged(self._stored(table, first, prefix), changes)

    def _stored(self, table: str, first: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        seed, last_key = self._seeds[table], b""
        try:
            with self._reader.cursor(db=self._handles[table]) as cursor:
                if first and not cursor.set_range(first):
                    return
                for key, stored in cursor.iternext():
                    value = unsealed(seed, key, stored)
                    if value is None:  # its key may be wrong, too, and says nothing about the end
                        self._meet_bad_row(table, key)
                        continue
                    if not key.startswith(prefix):
                        if key < prefix:
                            raise lmdb.CorruptedError("its keys are in the wrong order")
                        return
                    if key <= last_key:
                        raise lmdb.CorruptedError("its keys are in the wrong order")
                    last_key = key
                    yield key, value
        except (lmdb.Error, MemoryError) as error:
            self._meet_damage(error)

    def _meet_bad_row(self, table: str, key: bytes) -> None:
        """Note a row whose checksum is wrong, once. It counts as missing until it is put again. It
        isn't deleted, as its key may be wrong, too, and another row's: the next start copies the
        database without it."""
        if (table, key) in self._bad_keys:
            return
        self._bad_keys.add((table, key))
        self.note_lost_row(table)
        self.on_bad_row(table, key)

    def note_lost_rows(self) -> None:
        """Note that rows are out of reach, although LMDB finds no fault: the same as an unreadable
        row."""
        self._meet_damage(lmdb.CorruptedError("rows are out of reach"))

    def note_lost_row(self, table: str) -> None:
        """Note that a row of the table is damaged or gone. Before the next daemon opens the
        database, all of it is read (see `copy_suspect`)."""
        self.bad_rows += 1
        if table not in self._bad_tables:
            self._bad_tables.add(table)
            log.warning(
                "%s: a row of %s has a wrong checksum or is lost: it counts as missing (no more "
                "such lines for this table)",
                self._data_path,
                table,
            )

    def _meet_damage(self, error: lmdb.Error | MemoryError) -> None:
        """Note that a row can't be read. From now on all rows on disk count as missing, and
        nothing is committed: each commit fails and leaves a mark, and the next `open` raises
        `DamagedDatabaseError`."""
        if self._damage is None:
            self._damage = error
            self._reader.abort()
            log.warning(
                "the database %s is damaged (%s): what is in it counts as missing, and changes are "
                "lost with this daemon; restart it to have a new one",
                self._path,
                error,
            )

    def snapshot(self) -> DatabaseSnapshot:
        """Return a view of what the last commit wrote; call `commit` first.

        The caller must close it before the database, and soon: LMDB can't reuse the pages that
        the view sees, so the file grows while it is open.
        """
        return DatabaseSnapshot(self._path, self._env, self._handles)

    def read_through(self, table: str) -> None:
        """Read all committed rows of the table, to check them at the start.

        Raises `DamagedDatabaseError` if a row can't be read. Logs nothing and leaves no mark.
        """
        with explained(self._path), self._reader.cursor(db=self._handles[table]) as cursor:
            for _ in cursor.iternext():
                pass

    @property
    def pending_count(self) -> int:
        """The number of changes that a crash at this moment would lose."""
        return sum(len(p.pending) + len(p.flushing) for p in self._pending.values())

    @property
    def is_damaged(self) -> bool:
        """Whether nothing is committed any more, because a row could not be read. The next `open`
        raises `DamagedDatabaseError`."""
        return self._damage is not None

    @property
    def is_behind(self) -> bool:
        """Whether so much is pending (some 30 MB) that background work must wait for a commit.
        False while commits fail, as that may last for a long time."""
        return not self._failing and self.pending_count > _MUCH_PENDING

    async def commit(self) -> bool:
        """Write all changes that are pending when this is called, durably. Return whether it
        succeeded.

        After a failure (for example a full disk) the changes stay pending. Readers see no
        difference, but a crash would lose more. Successive failures are logged once.
        """
        async with self._commit_lock:
            if not any(changes.pending for changes in self._pending.values()):
                return True
            number = self._begin_commit()
            batch = {name: pending.begin_commit() for name, pending in self._pending.items()}
            committed = False
            try:
                await trio.to_thread.run_sync(self._write, batch, limiter=self._commit_thread)
                committed = True
                self._failing = False
                if self._wal is not None:
                    self._wal.end_commit(number)
            except (lmdb.Error, MemoryError, OSError) as error:
                if isinstance(error, DAMAGE):
                    self._meet_damage(error)
                if not self._failing and self._damage is None:
                    log.warning("can't write the database %s: %s", self._path, error)
                self._failing = True
            finally:
                self._end_commit(committed)
            if committed and self._wants_wal:
                self.begin_write_ahead_log()
            return committed

    def recover(self, table: str, key: bytes, stem: Path | None = None) -> int:
        """Read the changes that a killed process left in its write-ahead log (see
        `begin_write_ahead_log`), and make them pending. Return their number. Call this at the
        start; it blocks for the disk.

        The row `key` of `table` has the `LogPosition`. The log's files have the path `stem` with
        endings; by default they are beside LMDB's files.
        """
        self._position_row = (table, key)
        self._wal_stem = stem or self._wal_stem
        if not any(self._position()):
            self._put_position(LogPosition(secrets.randbits(64), 0))
        position = self._position()
        try:
            changes = read_write_ahead_log(self._wal_stem, position)
        except OSError as error:
            log.warning("can't read the write-ahead log of %s: %s", self._path, error)
            changes = []
        pending = list(self._pending.values())
        for change in changes:
            pending[change.table].write(change.key, change.value)
        if changes:
            self._put_position(position._replace(number=position.number + len(changes)))
        return len(changes)

    def begin_write_ahead_log(self) -> None:
        """From now on changes made before a call of `write_ahead` survive the end of this process,
        but not a power cut. Call `recover` first.

        The new log begins with all changes that are not yet committed, including those from
        `recover`. If nothing was ever committed, the log begins after the first commit: before
        that, the database on disk has no identity to match the log with.
        """
        position = LogPosition.unpack(self._committed(*self._position_row))
        self._wants_wal = position.identity == 0
        if self._wants_wal:
            return
        try:
            self._wal = WriteAheadLog(self._wal_stem, position, self._uncommitted())
        except OSError as error:
            log.warning("can't keep a write-ahead log in %s: %s", self._wal_stem.parent, error)

    def _uncommitted(self) -> Iterator[LoggedChange]:
        for number, pending in enumerate(self._pending.values()):
            for key, value in pending.all().items():
                if key != self._position_row[1]:
                    yield LoggedChange(number, key, value)

    def logged(self, table: str, key: bytes) -> bytes | None:
        """Return the row as the next process finds it if this process is killed now."""
        if self._wal is not None:
            self._wal.write_ahead()
            if self._wal.is_whole:
                return self.get(table, key)
        return self._committed(table, key)

    def _committed(self, table: str, key: bytes) -> bytes | None:
        try:
            stored: bytes | None = self._reader.get(key, db=self._handles[table])
        except (lmdb.Error, MemoryError) as error:  # a damaged length may be gigabytes
            self._meet_damage(error)
            return None
        if stored is None:
            return None
        value = unsealed(self._seeds[table], key, stored)
        if value is None:
            self._meet_bad_row(table, key)
        return value

    def last_key(self, table: str) -> bytes | None:
        """Return the greatest key, or None if the table is empty. A key that was deleted since
        the last commit counts, too."""
        pending = self._pending[table]
        keys = [max(rows) for rows in (pending.pending, pending.flushing) if rows]
        try:
            with self._reader.cursor(db=self._handles[table]) as cursor:
                for key, stored in cursor.iterprev():
                    if unsealed(self._seeds[table], key, stored) is not None:
                        keys.append(key)
                        break
                    self._meet_bad_row(table, key)
        except (lmdb.Error, MemoryError) as error:
            self._meet_damage(error)
        return max(keys, default=None)

    def write_ahead(self) -> None:
        """Write the noted changes to the write-ahead log. Call this before answering a process that
        may outlive this one (the kernel). Costs nothing without a log."""
        if self._wal is not None:
            self._wal.write_ahead()

    def _position(self) -> LogPosition:
        return LogPosition.unpack(self.get(*self._position_row))

    def _put_position(self, position: LogPosition) -> None:
        table, key = self._position_row
        self._pending[table].write(key, position.pack())

    def _begin_commit(self) -> int:
        """Add the rows that belong to every commit. Return the number of the last change in the
        write-ahead log that this commit contains."""
        self.before_commit()
        if self._wal is None:
            return 0
        number = self._wal.begin_commit()
        self._put_position(self._position()._replace(number=number))
        return number

    def _end_commit(self, committed: bool) -> None:
        # First renew the read transaction, then drop the pending changes, with no await between:
        # no read can miss a change that moves from these to LMDB.
        self._reader.abort()
        if self._damage is None:
            self._reader = self._env.begin()
        for pending in self._pending.values():
            pending.end_commit(committed)

    def _write(self, batch: dict[str, ChangedRows]) -> None:
        if self._damage is not None:
            self._data_path.with_name(MARK_NAME).touch()
            raise self._damage
        if self._bad_tables:
            self._data_path.with_name(SUSPECT_NAME).touch()
        with self._env.begin(write=True) as txn:
            for name, changes in batch.items():
                handle, seed = self._handles[name], self._seeds[name]
                for key in sorted(changes):
                    value = changes[key]
                    if value is None:
                        txn.delete(key, db=handle)
                    else:
                        txn.put(key, sealed(seed, key, value), db=handle)
        self._read_back(batch)

    def _read_back(self, batch: dict[str, ChangedRows]) -> None:
        """Raise `lmdb.CorruptedError` if LMDB doesn't find what it has just written: in damaged
        pages it may put a row where no look-up finds it. Of large batches, a sample is read."""
        with self._env.begin() as txn:
            for name, changes in batch.items():
                handle = self._handles[name]
                step = 1 + len(changes) // _MOST_READ_BACK
                for key, value in islice(changes.items(), 0, None, step):
                    stored = txn.get(key, db=handle)
                    if stored is None or value is None:
                        if stored is not value:
                            raise lmdb.CorruptedError("a row is not found after its commit")
                    elif not stored.startswith(value):
                        raise lmdb.CorruptedError("a row has changed in its commit")

    async def commit_loop(self, interval_s: float = 1.0) -> None:
        """Commit every `interval_s` until cancelled. Cancel it before `close`."""
        while True:
            await trio.sleep(interval_s)
            await self.commit()

    def close(self) -> None:
        """Commit the pending changes and close. Blocks for the fsync; call it after the loop."""
        self._begin_commit()
        committed = False
        try:
            self._write({name: pending.all() for name, pending in self._pending.items()})
            committed = True
        except (lmdb.Error, MemoryError, OSError) as error:
            if self._damage is None:
                log.warning("can't write the database %s: %s", self._path, error)
        if self._wal is not None:
            self._wal.close(committed)
            self._wal = None
        self.abandon()

    def abandon(self) -> None:
        """Close without a commit. The pending changes are lost, as in a crash."""
        if self._wal is not None:
            self._wal.close(is_committed=False)
        self.residency.close()
        self._reader.abort()
        self._env.close()
