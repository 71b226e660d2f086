"""Polling for page-in: cold reads that a fast disk answers before a thread could start.

A read with RWF_NOWAIT that finds a page missing makes the kernel begin to read it, and returns
EAGAIN (`filemap_get_pages` in mm/filemap.c calls `page_cache_sync_ra`; Linux 5.9 and later). So the
failed `read_nowait` has already started the disk, and a second attempt a moment later finds the
bytes. A thread would instead cost two wake-ups and contention for the interpreter lock. With 100 KB
files on a virtual disk and a dropped page cache, polling served 1.3 to 1.6 times as many files per
second with 1, 4 and 16 readers (alternating runs without and with it; "dropped" in bench/ measures
the current state).

On a slower disk polling is a waste: it stops after a few failures, and is tried again from time to
time.
"""

from collections.abc import Callable
from time import perf_counter

import trio

_LOOK_FOR_S = 0.0005
"""How long one read polls. A thread round trip takes 100 to 250 us; a solid-state disk, 50 to
500 us."""

_MOST = 32
"""Maximum number of reads that poll at a time: each polls once in every turn of the loop."""

_CREDIT = 8
"""Polling stops when so many more polled reads have failed than have succeeded."""

_TRY_AGAIN_AFTER = 64
"""While polling has stopped, one of so many reads polls."""


class PageInPolling:
    """The polling reads of one tier. `read_nowait` is `Disk.read_nowait`."""

    def __init__(self, read_nowait: Callable[[int, tuple[memoryview], int, int], int]) -> None:
        self._read_nowait = read_nowait
        self._credit = _CREDIT
        self._not_polled = 0
        self._polling = 0

    async def read(self, fd: int, length: int, offset: int, flags: int | None) -> bytearray | None:
        """Return `length` bytes at `offset` of `fd` if the kernel reads them in soon, else None.

        A read with RWF_NOWAIT must have just failed for these bytes. `flags` must make the read
        non-blocking; with None nothing is read. The caller must prevent overwriting meanwhile.
        """
        if flags is None or self._polling >= _MOST or not self._worth_it():
            return None
        self._polling += 1
        try:
            data = await self._poll(fd, length, offset, flags)
        finally:
            self._polling -= 1
        self._credit = min(self._credit + 1, _CREDIT) if data else max(self._credit - 1, 0)
        return data

    def _worth_it(self) -> bool:
        if self._credit > 0:
            return True
        self._not_polled = (self._not_polled + 1) % _TRY_AGAIN_AFTER
        return self._not_polled == 0

    async def _poll(self, fd: int, length: int, offset: int, flags: int) -> bytearray | None:
        data = bytearray(length)
        buffers = (memoryview(data),)
        give_up_at = perf_counter() + _LOOK_FOR_S
        while True:
            await trio.lowlevel.checkpoint()
            try:
                if self._read_nowait(fd, buffers, offset, flags) == length:
                    return data
            except BlockingIOError:
                pass
            except OSError:
                return None  # the caller's thread gets the same error and handles it
            if perf_counter() > give_up_at:
                return None
