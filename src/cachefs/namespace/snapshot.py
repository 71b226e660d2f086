"""The entries of one directory in a fixed order, readable while they still arrive.

A directory is read by position (`getdents` after `getdents`), so what has been handed out must
keep its place whatever happens to the directory meanwhile. A snapshot only grows, then ends.
"""

from array import array

import trio

from cachefs.errors import CachefsError


class Snapshot:
    """Names and inode numbers, about 20 bytes an entry beside the names themselves."""

    __slots__ = (
        "_ends",
        "_inos",
        "_names",
        "_progress",
        "as_of_ns",
        "ended",
        "error",
        "generation",
        "has_readers",
        "is_awaited",
        "max_pages",
        "mtime_ns",
        "unbound_count",
    )

    def __init__(self, generation: int, as_of_ns: int, unbound_count: int) -> None:
        """`as_of_ns` is when the listing behind it began; `unbound_count` is the table's: while
        that stands, every name here still stands for its inode."""
        self.generation = generation
        self.max_pages: int | None = None
        """How many pages the listing may cost before it is given up; None once it has readers."""
        self.has_readers = False
        self.is_awaited = False
        """A request of the kernel waits for it."""
        self.as_of_ns = as_of_ns
        self.unbound_count = unbound_count
        self.mtime_ns: int | None = None
        """The directory's, while its names are these; None if they aren't, or may not be."""
        self.ended = False
        self.error: CachefsError | None = None
        self._names = bytearray()
        self._ends = array("Q")
        self._inos = array("Q")
        self._progress = trio.Event()

    def __len__(self) -> int:
        return len(self._inos)

    def joined(self) -> "Snapshot":
        """Note that it has a reader, for a request of the kernel."""
        self.is_awaited = True
        return self.joined_by_job()

    def joined_by_job(self) -> "Snapshot":
        """Note that it has a reader who has time."""
        self.max_pages = None
        self.has_readers = True
        return self

    def append(self, name: bytes, ino: int) -> None:
        self._names += name
        self._ends.append(len(self._names))
        self._inos.append(ino)

    def entry(self, position: int) -> tuple[bytes, int]:
        start = self._ends[position - 1] if position else 0
        return bytes(self._names[start : self._ends[position]]), self._inos[position]

    def wake(self) -> None:
        """Tell those who wait that entries have come."""
        self._progress.set()
        self._progress = trio.Event()

    def end(self, error: CachefsError | None = None) -> None:
        """Nothing more comes: the directory is complete, or its listing failed."""
        self.ended = True
        self.error = error
        self.wake()

    async def progress(self) -> None:
        """Wait for the next `wake`."""
        await self._progress.wait()

    async def wait_for_end(self) -> None:
        while not self.ended:
            await self._progress.wait()

    async def has(self, position: int) -> bool:
        """Wait until the entry is there (True) or will never be (False).

        Raises the error of a failed listing, to every reader a fresh copy of its own.
        """
        while position >= len(self._inos):
            if self.error is not None:
                raise type(self.error)(str(self.error))
            if self.ended:
                return False
            await self._progress.wait()
        return True
