"""The finished directory snapshots of a mount, kept for readers that begin or continue in them."""

from collections import OrderedDict

from cachefs.format.inode_record import Inode, Listing
from cachefs.namespace.directories.snapshot import DirectorySnapshot

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
