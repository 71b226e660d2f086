"""Cold reads that a fast disk answers before a thread could be woken up for them.

A read with RWF_NOWAIT that finds a page missing makes the kernel begin to read it, and returns
EAGAIN (`filemap_get_pages` in mm/filemap.c calls `page_cache_sync_ra`; Linux 5.9 and later). So the
look that `read_now` takes in vain has started the disk, and another look a moment later finds the
bytes. A thread costs two wake-ups and a fight for the interpreter's lock instead. With 100 KB
files on a virtual disk and the page cache dropped, 1.3 to 1.6 times as many files came per second,
with 1, 4 and 16 readers (before and after in turn; as it is now: "dropped" in bench/).

Where the disk is slower than that, looking is a waste: it is given up after a few vain ones, and
tried again now and then.
"""

from collections.abc import Callable
from time import perf_counter

import trio

_LOOK_FOR_S = 0.0005
"""A thread and back takes 100 to 250 us; a solid-state disk, 50 to 500."""

_MOST = 32
"""Watchers at a time: each looks once in every turn of the loop."""

_CREDIT = 8
"""Reads watched in vain, more than those that came, until watching is given up."""

_TRY_AGAIN_AFTER = 64
"""Reads not watched, until one is again."""


class Arrivals:
    """Of one tier. `read_now` is `Disk.read_now`."""

    def __init__(self, read_now: Callable[[int, tuple[memoryview], int, int], int]) -> None:
        self._read_now = read_now
        self._credit = _CREDIT
        self._unwatched = 0
        self._watchers = 0

    async def read(self, fd: int, length: int, offset: int, flags: int | None) -> bytearray | None:
        """`length` bytes that the kernel was just asked for, if they come at once; else None.

        `flags` are such that the read never waits. The caller keeps the bytes from being
        overwritten meanwhile.
        """
        if flags is None or self._watchers >= _MOST or not self._worth_it():
            return None
        self._watchers += 1
        try:
            data = await self._watch(fd, length, offset, flags)
        finally:
            self._watchers -= 1
        self._credit = min(self._credit + 1, _CREDIT) if data else max(self._credit - 1, 0)
        return data

    def _worth_it(self) -> bool:
        if self._credit > 0:
            return True
        self._unwatched = (self._unwatched + 1) % _TRY_AGAIN_AFTER
        return self._unwatched == 0

    async def _watch(self, fd: int, length: int, offset: int, flags: int) -> bytearray | None:
        data = bytearray(length)
        buffers = (memoryview(data),)
        give_up_at = perf_counter() + _LOOK_FOR_S
        while True:
            await trio.lowlevel.checkpoint()
            try:
                if self._read_now(fd, buffers, offset, flags) == length:
                    return data
            except BlockingIOError:
                pass
            except OSError:
                return None  # the thread meets it too, and its caller knows what to do
            if perf_counter() > give_up_at:
                return None
