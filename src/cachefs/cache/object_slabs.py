"""Gives large objects a slab of their own, so that the kernel can read their files by itself.

The slab of an object has its bytes at the places that they have in the object, and nothing else.
So once it is complete, the kernel may serve reads and mappings of the object from that file without
this process (FUSE passthrough). Blocks that are fetched afterwards enter it directly. Those that
the tiers have already are moved there. All of them must have been compared with their checksums
since the start: nobody compares them later, but the scrubber.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import trio

from cachefs.cache.levels.active_tier import ActiveTier
from cachefs.cache.levels.tier_set import TierSet
from cachefs.cache.tier.admission import Candidate
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.slab import Slab
from cachefs.errors import WorkersStoppedError
from cachefs.format.slab import WholeObject
from cachefs.types import BlockKey, BlockLocation, Medium, ObjectRef

_PAUSE_S = 0.02
_STORED_S = 1.0
_MOST_INODES = 4_096
_LOOKS = 500
"""Blocks to look up in one turn of the event loop: less than 1 ms."""


class ObjectSlabs:
    """The slabs for whole objects of one mount; the `BlockCache` owns it."""

    def __init__(
        self, tiers: TierSet, admitting: dict[BlockKey, memoryview], least_bytes: int | None
    ) -> None:
        """Objects of `least_bytes` or more get a slab of their own, with None no object does.
        `admitting` are the fetched blocks that no tier has stored yet."""
        self._tiers = tiers
        self._admitting = admitting
        self.least_bytes = math.inf if least_bytes is None else least_bytes
        self.inos: OrderedDict[bytes, int] = OrderedDict()
        """Object id -> inode, of the latest large files of which something was heard."""
        self._read: dict[bytes, ObjectRef] = {}
        """Objects that wait for `run`."""
        self._parked = trio.lowlevel.ParkingLot()
        self.on_complete: Callable[[bytes], None] = lambda object_id: None
        """Called with the id of an object whose slab `keep` has found or made complete. Only the
        `Publisher` sets it."""

    def wants(self, ref: ObjectRef) -> bool:
        """Whether the object is large enough for a slab of its own."""
        return ref.meta.size_bytes >= self.least_bytes

    def has(self, object_id: bytes) -> bool:
        """Whether the object has a slab of its own, in which there is space for all of it."""
        return self._find(object_id) is not None

    def find(self, object_id: bytes) -> tuple[TierStore, Slab] | None:
        """Return store and slab of an object that has a slab of its own, else None."""
        active = self._find(object_id)
        if active is None:
            return None
        return active.store, active.directory.slabs.of_object[object_id]

    def complete(self, object_id: bytes) -> tuple[TierStore, Slab] | None:
        """As `find`, but only if the slab has all blocks of the object, and all were verified since
        the start."""
        found = self.find(object_id)
        is_complete = found is not None and found[1].fd >= 0 and found[1].is_complete
        return found if is_complete else None

    def _find(self, object_id: bytes) -> ActiveTier | None:
        for active in self._tiers:
            if object_id in active.directory.slabs.of_object and active.usable:
                return active
        return None

    def note_inode(self, ino: int, ref: ObjectRef) -> None:
        """Note the inode of an object that `wants` a slab of its own."""
        self.inos[ref.object_id] = ino
        self.inos.move_to_end(ref.object_id)
        if len(self.inos) > _MOST_INODES:
            self.inos.popitem(last=False)

    def note_read(self, ref: ObjectRef, to_end: bool) -> None:
        """Note that a reader has read some of an object that `wants` a slab of its own, perhaps
        `to_end`. If all of it is cached, it gets a complete one soon."""
        found = self.find(ref.object_id)
        slab = None if found is None else found[1]
        is_due = to_end if slab is None else slab.used_count == slab.slot_count
        if is_due and ref.object_id not in self._read:
            self._read[ref.object_id] = ref
            self._parked.unpark()

    async def run(self) -> None:
        """Run forever: give objects that were read a complete slab of their own."""
        while True:
            while not self._read:
                await self._parked.park()
            await trio.sleep(_STORED_S)  # until the last blocks are stored
            object_id, ref = next(iter(self._read.items()))
            keys = (BlockKey(object_id, index) for index in range(ref.block_count))
            if all(map(self._tiers.have, keys)):
                await self.keep(ref, may_evict=False)
            del self._read[object_id]

    async def keep(
        self, ref: ObjectRef, may_evict: bool, on_made: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Make a slab for the object if it has none, call `on_made` with whether it has one now,
        then move its cached blocks there, and verify them. With `may_evict`, other objects that
        have slabs of their own are evicted if there is no space.

        It is in the fastest tier on a disk that has space for it. The kernel keeps in memory what
        is read from there, so memory tiers only have those for which no disk has space.
        """
        try:
            home = await self._make(ref, may_evict)
        except WorkersStoppedError:  # its tier is being removed
            home = None
        on_made(home is not None)
        if home is not None:
            with suppress(WorkersStoppedError):
                if not home[1].is_complete:
                    await self._gather(ref, *home)
                if self.complete(ref.object_id) is not None:
                    self.on_complete(ref.object_id)

    async def _make(self, ref: ObjectRef, may_evict: bool) -> tuple[ActiveTier, Slab] | None:
        active = self._find(ref.object_id)
        by_medium = sorted(self._tiers.all(), key=lambda a: a.directory.medium is Medium.MEM)
        whole = WholeObject(ref.object_id, ref.meta.size_bytes)
        for candidate in by_medium if active is None else [active]:
            if not candidate.usable or candidate.admission.closed:
                continue
            slab = await candidate.evictor.make_whole(whole, may_evict)
            if slab is not None:
                return candidate, slab
        return None

    async def _gather(self, ref: ObjectRef, home: ActiveTier, slab: Slab) -> None:
        """Move all blocks of the object that are stored elsewhere to its slab."""
        # These may have got a place before there was the slab. All others enter it.
        coming = [key for key in self._admitting if key.object_id == ref.object_id]
        while any(key in self._admitting for key in coming):  # noqa: ASYNC110 - rare and short
            await trio.sleep(_PAUSE_S)
        for index in range(ref.block_count):
            if index % _LOOKS == _LOOKS - 1:
                await trio.lowlevel.checkpoint()
            key = BlockKey(ref.object_id, index)
            if slab.fd < 0 or slab.draining or not home.usable:
                return
            for active in self._tiers.all():
                location = active.store.index.locate(key)
                if location is not None and (active is not home or location.slab != slab.slab_id):
                    await self._move(key, active.store, location, home)
            if slab.holds(index) and slab.verified[index] == 0:
                began_s = trio.current_time()
                await home.store.verify_slot(key)
                await trio.sleep(trio.current_time() - began_s)  # leave half of the disk to others

    async def _move(
        self, key: BlockKey, store: TierStore, location: BlockLocation, home: ActiveTier
    ) -> None:
        """Copy one block to the slab of its object, and then drop it where it was."""
        data = await store.read_slot(key, 0, location.length)
        if data is None or home.admission.closed:  # nobody would finish the candidate
            return
        moved = trio.Event()

        def finish(candidate: Candidate, is_stored: bool) -> None:
            other = store.slabs.by_id.get(location.slab)
            if is_stored and store is not home.store and other is not None:
                if other.is_pinned(location.slot):
                    home.store.pin_moved(key)
                if store.moved_away(key, other, location):
                    store.put_row(other)
            moved.set()

        now = self._tiers.common.history.now
        home.admission.offer(
            Candidate(key, memoryview(data), finish, now, checksum=location.checksum)
        )
        await moved.wait()
