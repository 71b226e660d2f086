"""An ordered key-value store on LMDB whose writes take no time on the event loop.

Writes go to a dict, and reads see them at once. About once a second a worker thread writes the
dict as one LMDB transaction with fsync. This transaction is the only commit point: a crash or a
power cut loses the writes since then, and nothing else.

Concurrency: methods run on the loop thread, except three that run in worker threads. `_write`
uses only the frozen batch and its own write transaction. `_bring` uses only its own read
transaction. `warm` doesn't use LMDB. Between two awaits a caller sees no changes but its own.
"""

import contextlib
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, TypeVar, TypeVarTuple

import lmdb
import trio

from cachefs.db.environment import DATA_NAME, MARK_NAME, explained, explanation, open_env
from cachefs.db.journal import Change, Journal, read_journal
from cachefs.db.mapping import cold_share, mapped_bytes, unmap_pages
from cachefs.db.overlay import Changes, Overlay

log = logging.getLogger(__name__)

WARM_LIMIT_BYTES = 1 << 30
"""The most bytes that `Database.warm` reads."""

_WARM_STEP_BYTES = 4 << 20

MOST_MAPPED_BYTES = 64 << 20
"""`Database.keep_small` acts when more bytes of mapped files than this are in the process's memory,
libraries (some 25 MiB) included."""

_KEEP_SMALL_INTERVAL_S = 1.0

_KEEP_WARM_INTERVAL_S = 1.0
_WARM_AGAIN_S = 10.0
_COLD_SHARE = 1 / 64
_FETCHERS = 4

Get = Callable[[str, bytes], bytes | None]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MUCH_PENDING = 100_000
"""Number of changes."""

_JOURNAL_ROW = Struct("<QQ")
"""The identity of the database (a random number), and the number of the last committed change."""


class Database:
    """A set of named tables in one directory. See the module docstring for its guarantees.

    `get`, `scan`, `kept` and `last_key` never raise LMDB's errors: an unreadable row counts as
    missing, and from then on the database commits nothing (see `_meet_damage`).
    """

    def __init__(self, env: lmdb.Environment, tables: Sequence[str]) -> None:
        self._env = env
        self._data_path = Path(env.path()) / DATA_NAME
        self._handles = {name: env.open_db(name.encode()) for name in tables}
        self._overlays = {name: Overlay() for name in tables}
        self._reader = env.begin()
        self._commit_lock = trio.Lock()
        # Commits have their own threads, so that they never wait for other work that hangs.
        self._threads = trio.CapacityLimiter(2)
        self._fetchers = trio.CapacityLimiter(_FETCHERS)
        self._bringing = threading.Condition()
        self._bringers = 0
        self._is_closed = False
        self.is_cold = False
        """Whether some of the file was not in memory when `keep_warm` last checked. If so, call
        `bring` before looking rows up on the loop."""
        self._failing = False
        self._damage: lmdb.Error | None = None
        """The first LMDB error for a row that could not be read."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called on the loop just before a batch is frozen, with no await between: the rows that
        it puts are part of the batch. For rows that would cost too much to put at every change."""
        self._journal: Journal | None = None
        self._journal_row = ("", b"")
        self._journal_stem = self._data_path.with_name("journal")
        self._wants_journal = False
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
                return cls(env, tables)
            except BaseException:
                env.close()
                raise

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value, pending changes included; None if there is no such row."""
        overlay = self._overlays[table]
        if key in overlay.pending:
            return overlay.pending[key]
        if key in overlay.flushing:
            return overlay.flushing[key]
        try:  # the code of `_committed`, repeated for speed
            value: bytes | None = self._reader.get(key, db=self._handles[table])
        except lmdb.Error as error:
            self._meet_damage(error)
            return None
        return value

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Insert or replace a row. The next commit makes it durable."""
        self._overlays[table].write(key, value)
        if self._journal is not None:
            self._journal.note(self._table_numbers[table], key, value)

    def put_all(self, table: str, rows: Mapping[bytes, bytes]) -> None:
        """Do the same as `put` for many rows; this is cheaper."""
        self._overlays[table].write_all(rows)
        if self._journal is not None:
            for key, value in rows.items():
                self._journal.note(self._table_numbers[table], key, value)

    def delete(self, table: str, key: bytes) -> None:
        """Delete a row, if it exists. The next commit makes this durable."""
        self._overlays[table].write(key, None)
        if self._journal is not None:
            self._journal.note(self._table_numbers[table], key, None)

    def scan(
        self, table: str, prefix: bytes, start: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the rows whose key begins with `prefix` and is not less than `start`.

        Rows come in key order; pending changes are included. The iterator is invalid after the
        next await or write.
        """
        first = max(start or prefix, prefix)
        changes = self._overlays[table].changes_from(first, prefix)
        return _merge(self._stored(table, first, prefix), changes)

    def _stored(self, table: str, first: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        try:
            with self._reader.cursor(db=self._handles[table]) as cursor:
                if first and not cursor.set_range(first):
                    return
                for key, value in cursor.iternext():
                    if not key.startswith(prefix):
                        return
                    yield key, value
        except lmdb.Error as error:
            self._meet_damage(error)

    def _meet_damage(self, error: lmdb.Error) -> None:
        """Note an unreadable row, which counts as missing. From now on nothing is committed: each
        commit fails and leaves a mark, and the next `open` raises `DamagedDatabaseError`."""
        if self._damage is None:
            self._damage = error
            log.warning(
                "the database %s is damaged (%s): some of it counts as missing, and changes are "
                "lost with this daemon; restart it to have a new one",
                self._env.path(),
                error,
            )

    def snapshot(self) -> "DatabaseSnapshot":
        """Return a view of what the last commit wrote; call `commit` first.

        The caller must close it before the database, and soon: LMDB can't reuse the pages that
        the view sees, so the file grows while it is open.
        """
        return DatabaseSnapshot(self._env, self._handles)

    def read_through(self, table: str) -> None:
        """Read all committed rows of the table, to check them at the start.

        Raises `DamagedDatabaseError` if a row can't be read. Logs nothing and leaves no mark.
        """
        with explained(self._env.path()), self._reader.cursor(db=self._handles[table]) as cursor:
            for _ in cursor.iternext():
                pass

    @property
    def pending_count(self) -> int:
        """The number of changes that a crash at this moment would lose."""
        return sum(len(o.pending) + len(o.flushing) for o in self._overlays.values())

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
            if not any(overlay.pending for overlay in self._overlays.values()):
                return True
            self.before_commit()
            number = self._begin_journalled()
            batch = {name: overlay.freeze() for name, overlay in self._overlays.items()}
            committed = False
            try:
                await trio.to_thread.run_sync(self._write, batch, limiter=self._threads)
                committed = True
                self._failing = False
                if self._journal is not None:
                    self._journal.end_commit(number)
            except (lmdb.Error, OSError) as error:
                if not self._failing and self._damage is None:
                    log.warning("can't write the database %s: %s", self._env.path(), error)
                self._failing = True
            finally:
                self._end_commit(committed)
            if committed and self._wants_journal:
                self.begin_journal()
            return committed

    def recover(self, table: str, key: bytes, stem: Path | None = None) -> int:
        """Read the changes that a killed process left in its journal (see `begin_journal`), and
        make them pending. Return their number. Call this at the start; it blocks for the disk.

        The row `key` of `table` has the journal's identity and last number. The journal's files
        have the path `stem` with endings; by default they are beside LMDB's files.
        """
        self._journal_row = (table, key)
        self._journal_stem = stem or self._journal_stem
        if not any(self._journalled()):
            self._put_journalled(secrets.randbits(64), 0)
        identity, last_number = self._journalled()
        try:
            changes = read_journal(self._journal_stem, identity, last_number)
        except OSError as error:
            log.warning("can't read the journal of %s: %s", self._env.path(), error)
            changes = []
        overlays = list(self._overlays.values())
        for number, changed_key, value in changes:
            overlays[number].write(changed_key, value)
        if changes:
            self._put_journalled(identity, last_number + len(changes))
        return len(changes)

    def begin_journal(self) -> None:
        """Begin a journal: from now on changes made before a `settle` survive the end of this
        process, but not a power cut. Call `recover` first.

        The new journal begins with all changes that are not yet committed, including those from
        `recover`. If nothing was ever committed, the journal begins after the first commit: before
        that, the database on disk has no identity to match the journal with.
        """
        identity, last_number = _unpack_journalled(self._committed(*self._journal_row))
        self._wants_journal = identity == 0
        if self._wants_journal:
            return
        try:
            changes = self._uncommitted()
            self._journal = Journal(self._journal_stem, identity, last_number, changes)
        except OSError as error:
            log.warning("can't keep a journal in %s: %s", self._journal_stem.parent, error)

    def _uncommitted(self) -> Iterator[Change]:
        for number, overlay in enumerate(self._overlays.values()):
            for key, value in (overlay.flushing | overlay.pending).items():
                if key != self._journal_row[1]:
                    yield number, key, value

    def kept(self, table: str, key: bytes) -> bytes | None:
        """Return the row as the next process finds it if this process is killed now."""
        if self._journal is not None:
            self._journal.settle()
            if self._journal.is_whole:
                return self.get(table, key)
        return self._committed(table, key)

    def _committed(self, table: str, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._reader.get(key, db=self._handles[table])
        except lmdb.Error as error:
            self._meet_damage(error)
            return None
        return value

    def last_key(self, table: str) -> bytes | None:
        """Return the greatest key, or None if the table is empty. A key that was deleted since
        the last commit counts, too."""
        overlay = self._overlays[table]
        keys = [max(changes) for changes in (overlay.pending, overlay.flushing) if changes]
        try:
            with self._reader.cursor(db=self._handles[table]) as cursor:
                if cursor.last():
                    keys.append(cursor.key())
        except lmdb.Error as error:
            self._meet_damage(error)
        return max(keys, default=None)

    def settle(self) -> None:
        """Write the noted changes to the journal. Call this before answering a process that may
        outlive this one (the kernel). Costs nothing without a journal."""
        if self._journal is not None:
            self._journal.settle()

    def _journalled(self) -> tuple[int, int]:
        """Return this database's identity and the number of the last committed change."""
        return _unpack_journalled(self.get(*self._journal_row))

    def _put_journalled(self, identity: int, number: int) -> None:
        table, key = self._journal_row
        self._overlays[table].write(key, _JOURNAL_ROW.pack(identity, number))

    def _begin_journalled(self) -> int:
        if self._journal is None:
            return 0
        number = self._journal.begin_commit()
        self._put_journalled(self._journalled()[0], number)
        return number

    def _end_commit(self, committed: bool) -> None:
        # First renew the read transaction, then shrink the overlay, with no await between: no
        # read can miss a change that moves from the overlay to LMDB.
        self._reader.abort()
        self._reader = self._env.begin()
        for overlay in self._overlays.values():
            overlay.thaw(committed)

    def _write(self, batch: dict[str, Changes]) -> None:
        if self._damage is not None:
            self._data_path.with_name(MARK_NAME).touch()
            raise self._damage
        with self._env.begin(write=True) as txn:
            for name, changes in batch.items():
                handle = self._handles[name]
                for key in sorted(changes):
                    value = changes[key]
                    if value is None:
                        txn.delete(key, db=handle)
                    else:
                        txn.put(key, value, db=handle)

    async def commit_loop(self, interval_s: float = 1.0) -> None:
        """Commit every `interval_s` until cancelled. Cancel it before `close`."""
        while True:
            await trio.sleep(interval_s)
            await self.commit()

    async def keep_small(self, most_bytes: int = MOST_MAPPED_BYTES) -> None:
        """Unmap the database's pages whenever mapped files take more than `most_bytes` of this
        process's memory; check once a second until cancelled. Cancel it before `close`.

        Use it for a database that needs few look-ups because the kernel caches the results, or
        that is rarely read as a whole.
        """
        while True:
            await trio.sleep(_KEEP_SMALL_INTERVAL_S)
            if mapped_bytes() > most_bytes:
                await trio.to_thread.run_sync(unmap_pages, self._data_path, limiter=self._threads)

    async def keep_warm(self) -> None:
        """Check once a second, until cancelled, whether the kernel has evicted pages of the file,
        and if so read the file again. Cancel it before `close`.

        After a read it pauses for 10 s, or for 100 s if pages are still missing then.
        """
        warm_at = -math.inf
        while True:
            await trio.sleep(_KEEP_WARM_INTERVAL_S)
            if await self.look_at_memory() and trio.current_time() >= warm_at:
                await self._in_thread(self.warm)
                was_of_use = not await self.look_at_memory()
                pause_s = _WARM_AGAIN_S * (1 if was_of_use else 10)
                warm_at = trio.current_time() + pause_s

    async def look_at_memory(self) -> bool:
        """Update `is_cold` and return it."""
        self.is_cold = await self._in_thread(cold_share, self._data_path) > _COLD_SHARE
        return self.is_cold

    async def bring(self, look_up: Callable[[Get], object]) -> None:
        """Call `look_up(get)` in a thread, so that the rows that it gets are in memory afterwards.

        `get(table, key)` sees committed rows only. LMDB errors are ignored here: the look-up on
        the loop meets them again.
        """
        await self._in_thread(self._bring, look_up)

    def _bring(self, look_up: Callable[[Get], object]) -> None:
        with self._bringing:
            if self._is_closed:
                return
            self._bringers += 1
        try:
            with contextlib.suppress(lmdb.Error), self._env.begin() as txn:
                look_up(lambda table, key: txn.get(key, db=self._handles[table]))
        finally:
            with self._bringing:
                self._bringers -= 1
                self._bringing.notify_all()

    def _end_bringing(self) -> None:
        """Wait until no thread uses LMDB, and refuse new ones: closing LMDB under them would
        crash the process."""
        with self._bringing:
            self._is_closed = True
            self._bringing.wait_for(lambda: not self._bringers)

    async def _in_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await trio.to_thread.run_sync(
            function, *args, limiter=self._fetchers, abandon_on_cancel=True
        )

    def warm(self, limit_bytes: int = WARM_LIMIT_BYTES) -> int:
        """Read the file into the page cache, so that look-ups on the loop don't wait for the disk.

        Reads at most `limit_bytes` and returns the bytes read. Errors are ignored. It blocks, so
        call it in a worker thread. It uses its own descriptor: the database may be closed, and
        the thread abandoned, at any time.
        """
        read_bytes = 0
        with contextlib.suppress(OSError), open(self._data_path, "rb", buffering=0) as file:
            size_bytes = min(limit_bytes, os.fstat(file.fileno()).st_size)
            os.posix_fadvise(file.fileno(), 0, size_bytes, os.POSIX_FADV_SEQUENTIAL)
            while read_bytes < size_bytes:
                step = file.read(min(_WARM_STEP_BYTES, size_bytes - read_bytes))
                if not step:
                    break
                read_bytes += len(step)
        return read_bytes

    def close(self) -> None:
        """Commit the pending changes and close. Blocks for the fsync; call it after the loop."""
        self.before_commit()
        self._begin_journalled()
        committed = False
        try:
            self._write({name: o.flushing | o.pending for name, o in self._overlays.items()})
            committed = True
        except (lmdb.Error, OSError) as error:
            if self._damage is None:
                log.warning("can't write the database %s: %s", self._env.path(), error)
        if self._journal is not None:
            self._journal.close(committed)
            self._journal = None
        self.abandon()

    def abandon(self) -> None:
        """Close without a commit. The pending changes are lost, as in a crash."""
        if self._journal is not None:
            self._journal.close(is_committed=False)
        self._end_bringing()
        self._reader.abort()
        self._env.close()


class DatabaseSnapshot:
    """A view of the committed rows that doesn't change. Any thread may use it, but only one at a
    time. Methods block for the disk."""

    def __init__(self, env: lmdb.Environment, handles: dict[str, Any]) -> None:
        self._path = env.path()
        self._handles = handles
        self._txn = env.begin()

    def count(self, table: str) -> int:
        """Return the number of rows."""
        rows: int = self._txn.stat(self._handles[table])["entries"]
        return rows

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value, or None. Raises `DamagedDatabaseError`."""
        try:
            value: bytes | None = self._txn.get(key, db=self._handles[table])
        except lmdb.Error as error:
            raise explanation(self._path, error) from error
        return value

    def scan(self, table: str, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the rows whose key begins with `prefix`, in key order. Raises
        `DamagedDatabaseError`."""
        with explained(self._path), self._txn.cursor(db=self._handles[table]) as cursor:
            if prefix and not cursor.set_range(prefix):
                return
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    return
                yield key, value

    def close(self) -> None:
        self._txn.abort()


def _unpack_journalled(row: bytes | None) -> tuple[int, int]:
    return _JOURNAL_ROW.unpack(row) if row and len(row) == _JOURNAL_ROW.size else (0, 0)


def _merge(
    stored: Iterator[tuple[bytes, bytes]], changes: list[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Merge two inputs that are in key order. Where both have a key, the change wins."""
    position = 0
    for key, value in stored:
        while position < len(changes) and changes[position][0] < key:
            changed_key, changed_value = changes[position]
            position += 1
            if changed_value is not None:
                yield changed_key, changed_value
        if position < len(changes) and changes[position][0] == key:
            changed_value = changes[position][1]
            position += 1
            if changed_value is not None:
                yield key, changed_value
        else:
            yield key, value
    for changed_key, changed_value in changes[position:]:
        if changed_value is not None:
            yield changed_key, changed_value
