"""Control how much of a database's file is in memory.

LMDB reads through a mapping, so a look-up waits for the disk if the kernel has reclaimed the page
that it needs.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import lmdb
import trio

from cachefs.db.mapping import cold_share, mapped_bytes, unmap_pages
from cachefs.db.snapshot import DatabaseSnapshot
from cachefs.errors import CacheDirError

_WARM_LIMIT_BYTES = 1 << 30
_WARM_STEP_BYTES = 4 << 20
_MOST_MAPPED_BYTES = 64 << 20
"""`keep_small` acts when more bytes of mapped files than this are in the process's memory,
libraries (some 25 MiB) included."""
_KEEP_SMALL_INTERVAL_S = 0.25
_KEEP_WARM_INTERVAL_S = 1.0
_WARM_AGAIN_S = 10.0
_COLD_SHARE = 1 / 64
_THREADS = 4

Get = Callable[[str, bytes], bytes | None]
"""Returns the value of a table's key."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Residency:
    """Which part of a database's file is in memory; its `Database` owns it. Methods run on the loop
    thread, except `warm` and `_look`, which run in worker threads: `warm` doesn't use LMDB, and
    `_look` uses only its own read transaction."""

    def __init__(self, env: lmdb.Environment, handles: dict[str, Any], path: Path) -> None:
        """`path` is LMDB's data file, and `handles` are its tables."""
        self._env = env
        self._handles = handles
        self._path = path
        self._threads = trio.CapacityLimiter(_THREADS)
        self._bringing = threading.Condition()
        self._bringers = 0
        self._is_closed = False
        self.is_cold = False
        """Whether some of the file was not in memory when `keep_warm` last checked. If so, call
        `bring` before looking rows up on the loop."""

    async def keep_small(self, most_bytes: int = _MOST_MAPPED_BYTES) -> None:
        """Unmap the file's pages whenever mapped files take more than `most_bytes` of this
        process's memory; check four times a second until cancelled. Cancel it before `close`.

        Use it for a database that needs few look-ups because the kernel caches the results, or
        that is rarely read as a whole.
        """
        while True:
            await trio.sleep(_KEEP_SMALL_INTERVAL_S)
            if mapped_bytes() > most_bytes:
                await trio.to_thread.run_sync(unmap_pages, self._path, limiter=self._threads)

    async def keep_warm(self) -> None:
        """Check once a second, until cancelled, whether the kernel has evicted pages of the file,
        and if so read the file again. Cancel it before `close`.

        After a read it pauses for 10 s, or for 100 s if pages are still missing then.
        """
        warm_at = -math.inf
        while True:
            await trio.sleep(_KEEP_WARM_INTERVAL_S)
            if await self.measure() and trio.current_time() >= warm_at:
                await self._in_thread(self.warm)
                was_of_use = not await self.measure()
                pause_s = _WARM_AGAIN_S * (1 if was_of_use else 10)
                warm_at = trio.current_time() + pause_s

    async def measure(self) -> bool:
        """Update `is_cold` and return it."""
        self.is_cold = await self._in_thread(cold_share, self._path) > _COLD_SHARE
        return self.is_cold

    async def bring(self, look_up: Callable[[Get], object]) -> None:
        """Call `look_up(get)` in a thread, so that the rows that it gets are in memory afterwards.

        `get(table, key)` sees committed rows only. Errors for damaged rows are ignored here: the
        look-up on the loop meets them again.
        """

        def bring(rows: DatabaseSnapshot) -> None:
            with contextlib.suppress(CacheDirError):
                look_up(rows.get)

        await self._in_thread(self._look, bring, None)

    async def read(self, read: Callable[[DatabaseSnapshot], T], otherwise: T) -> T:
        """Return `read(rows)`, called in a thread, where `rows` are the committed rows; if the
        database has been closed, return `otherwise`. Raises `DamagedDatabaseError`."""
        return await self._in_thread(self._look, read, otherwise)

    def _look(self, read: Callable[[DatabaseSnapshot], T], otherwise: T) -> T:
        with self._bringing:
            if self._is_closed:
                return otherwise
            self._bringers += 1
        try:
            rows = DatabaseSnapshot(str(self._path.parent), self._env, self._handles)
            try:
                return read(rows)
            finally:
                rows.close()
        finally:
            with self._bringing:
                self._bringers -= 1
                self._bringing.notify_all()

    def close(self) -> None:
        """Wait until no thread uses LMDB, and refuse new ones: closing LMDB under them would
        crash the process."""
        with self._bringing:
            self._is_closed = True
            self._bringing.wait_for(lambda: not self._bringers)

    async def _in_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await trio.to_thread.run_sync(
            function, *args, limiter=self._threads, abandon_on_cancel=True
        )

    def warm(self, limit_bytes: int = _WARM_LIMIT_BYTES) -> int:
        """Read the file into the page cache, so that look-ups on the loop don't wait for the disk.

        Reads at most `limit_bytes` and returns the bytes read. Errors are ignored. It blocks, so
        call it in a worker thread. It uses its own descriptor: the database may be closed, and
        the thread abandoned, at any time.
        """
        read_bytes = 0
        with contextlib.suppress(OSError), open(self._path, "rb", buffering=0) as file:
            size_bytes = min(limit_bytes, os.fstat(file.fileno()).st_size)
            os.posix_fadvise(file.fileno(), 0, size_bytes, os.POSIX_FADV_SEQUENTIAL)
            while read_bytes < size_bytes:
                step = file.read(min(_WARM_STEP_BYTES, size_bytes - read_bytes))
                if not step:
                    break
                read_bytes += len(step)
        return read_bytes
