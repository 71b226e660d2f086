"""The entries of one directory in a fixed order, readable while they still arrive.

A directory is read by position (`getdents` after `getdents`), so an entry must keep its position
while the directory changes. A snapshot only grows, then ends. Finished snapshots are kept for
readers that begin or continue in them.
"""

from array import array
from collections import OrderedDict

import trio

from cachefs.errors import CachefsError, OriginError
from cachefs.format.inode_record import Inode, Listing

_MOST_AHEAD = 20_000
"""A listing is at most so many entries ahead of the readers that began it."""
_LEFT_S = 30.0
_LEFT_BY_JOB_S = 600.0
"""A listing that nobody has read on for so long is given up. A job may be held up by readers."""


class DirectorySnapshot:
    """Names and inode numbers of one directory; owned by `Listings`. An entry takes about 20 bytes
    besides its name."""

    __slots__ = (
        "_asked",
        "_ends",
        "_inos",
        "_names",
        "_progress",
        "_read_to",
        "_waiting_for_end",
        "as_of_ns",
        "ended",
        "error",
        "generation",
        "has_job",
        "has_readers",
        "is_awaited",
        "is_held",
        "max_pages",
        "mtime_ns",
        "unbound_count",
    )

    def __init__(self, generation: int, as_of_ns: int, unbound_count: int) -> None:
        """`as_of_ns` is when the listing began. `unbound_count` is the table's count at this time:
        while the table still has the same count, every name here refers to its inode."""
        self.generation = generation
        self.max_pages: int | None = None
        """The most pages that the listing may take before it pauses; None if there is no limit, as
        always when it has readers."""
        self.has_readers = False
        self.has_job = False
        self.is_awaited = False
        """Whether a request of the kernel waits for it."""
        self.is_held = False
        """Whether the listing waits in `wait_for_readers`."""
        self._read_to = 0
        """The furthest position that was asked for."""
        self._waiting_for_end = 0
        self._asked = trio.Event()
        self.as_of_ns = as_of_ns
        self.unbound_count = unbound_count
        self.mtime_ns: int | None = None
        """The directory's mtime for which its names are these; None if the names may differ."""
        self.ended = False
        self.error: CachefsError | None = None
        self._names = bytearray()
        self._ends = array("Q")
        self._inos = array("Q")
        self._progress = trio.Event()

    def __len__(self) -> int:
        return len(self._inos)

    def joined(self) -> "DirectorySnapshot":
        """Note that a request of the kernel reads it. Return the snapshot."""
        self.is_awaited = True
        self.max_pages = None
        self.has_readers = True
        return self

    def joined_by_job(self) -> "DirectorySnapshot":
        """Note that a job reads it, which may wait longer. Return the snapshot."""
        self.max_pages = None
        self.has_readers = self.has_job = True
        return self

    def append(self, name: bytes, ino: int) -> None:
        """Add an entry. Call `wake` afterwards."""
        self._names += name
        self._ends.append(len(self._names))
        self._inos.append(ino)

    def entry(self, position: int) -> tuple[bytes, int]:
        """Return name and inode number of the entry at `position`, which must exist."""
        start = self._ends[position - 1] if position else 0
        return bytes(self._names[start : self._ends[position]]), self._inos[position]

    def wake(self) -> None:
        """Wake the waiting readers, as entries have been appended."""
        self._progress.set()
        self._progress = trio.Event()

    def end(self, error: CachefsError | None = None) -> None:
        """Note that no more entries follow: the directory is complete, or its listing failed with
        `error`."""
        self.ended = True
        self.error = error
        self.wake()

    async def progress(self) -> None:
        """Wait for the next `wake`."""
        await self._progress.wait()

    async def wait_for_end(self) -> None:
        """Wait until `end` was called, also with an error."""
        self._waiting_for_end += 1
        self._asked.set()
        try:
            while not self.ended:
                await self._progress.wait()
        finally:
            self._waiting_for_end -= 1

    async def wait_for_readers(self) -> None:
        """Wait while the listing, if it has readers, is far ahead of all of them: a listing may
        have no end, and its readers may be gone. Raises `OriginError` if nobody reads on for
        long."""
        while self.has_readers and not self._waiting_for_end:
            if len(self._inos) - self._read_to <= _MOST_AHEAD:
                return
            self._asked = trio.Event()
            self.is_held = True
            with trio.move_on_after(_LEFT_BY_JOB_S if self.has_job else _LEFT_S) as scope:
                await self._asked.wait()
            self.is_held = False
            if scope.cancelled_caught:
                raise OriginError("the listing was given up, because nobody read on")

    async def has(self, position: int) -> bool:
        """Wait until the entry at `position` has arrived; return False if it will never arrive.

        Raises the error of a failed listing. Each reader gets its own copy of it.
        """
        self._read_to = max(self._read_to, position)
        self._asked.set()
        while position >= len(self._inos):
            if self.error is not None:
                raise type(self.error)(str(self.error))
            if self.ended:
                return False
            await self._progress.wait()
        return True


_KEPT_NAMES = 500_000
"""The most names kept, about 25 MB. The least recently read snapshots are dropped first."""
_KEPT_OF_ONE = 8
"""The most snapshots kept of one directory, for readers that are in the middle of an older one."""
_SNAPSHOT_COST = 16
"""What a snapshot counts for in `_KEPT_NAMES`, besides its own names."""


class KeptSnapshots:
    """The kept snapshots by directory and generation, owned by `Listings`."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], DirectorySnapshot] = OrderedDict()
        self._generations: dict[int, list[int]] = {}
        """The generations of each directory's kept snapshots, the newest last."""
        self._names = 0

    def add(self, ino: int, snapshot: DirectorySnapshot) -> None:
        """Keep the snapshot, which has ended. Drop others if there are too many."""
        self._kept[(ino, snapshot.generation)] = snapshot
        self._names += len(snapshot) + _SNAPSHOT_COST
        generations = self._generations.setdefault(ino, [])
        generations.append(snapshot.generation)
        if len(generations) > _KEPT_OF_ONE:
            self._drop(ino, generations[0])
        while self._names > _KEPT_NAMES and len(self._kept) > 1:
            self._drop(*next(iter(self._kept)))

    def get(self, ino: int, generation: int) -> DirectorySnapshot | None:
        """Return the directory's snapshot with this generation; None if it isn't kept."""
        kept = self._kept.get((ino, generation))
        if kept is not None:
            self._kept.move_to_end((ino, generation))
        return kept

    def current(self, directory: Inode, listing: Listing) -> DirectorySnapshot | None:
        """Return the snapshot of this listing; None if it isn't kept, or if look-ups have changed
        names since."""
        generations = self._generations.get(directory.ino)
        if generations is None:
            return None
        kept = self._kept[(directory.ino, generations[-1])]
        if kept.as_of_ns != listing.listed_at_ns or kept.mtime_ns != directory.mtime_ns:
            return None
        return self.get(directory.ino, kept.generation)

    def _drop(self, ino: int, generation: int) -> None:
        self._names -= len(self._kept.pop((ino, generation))) + _SNAPSHOT_COST
        generations = self._generations[ino]
        generations.remove(generation)
        if not generations:
            del self._generations[ino]
