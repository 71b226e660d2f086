"""Publish blocks to the relay, which serves them without the daemon, and count the relay's hits.

The relay looks blocks up in a table in shared memory (fuse/relay/table.h). The daemon publishes a
block there, with its checksum, when it answers a read of the block. The relay compares the bytes
that it reads from a disk with the checksum. The daemon removes the block, before anything else
happens to its slot, when the slot is freed (`SlabSet.on_freed`), or when its slab is emptied,
deleted or withdrawn (`on_withdrawn`). docs/CONCURRENCY.md explains why that is enough.

The file of a whole object (`cache/object_slabs.py`) is marked in the table when it is complete.
Then the kernel may open it by itself."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.tier import partial_checksums
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.open_slabs import descriptors_for_slabs
from cachefs.cache_dir.slab import Slab
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation, Medium, ObjectRef

_FILES = 1 << 20
_SYNC_S = 0.2
_HITS = 1_000
"""Hits to process in one turn of the event loop: about 1 ms."""
_LOANS = 32
"""Most descriptors that replace others in each `_SYNC_S`. If far more slabs are read than may be
open, a higher number would keep daemon and relay busy with replacements only."""
_LOOKS = 64
SEEN_EVERY = 8
"""Of the blocks that are published ahead, this process serves one in so many itself."""
_AWAITED = 16_384
"""Most blocks to remember that are on their way into a tier after a read from the origin."""


class Table(partial_checksums.Table, Protocol):
    """The part of `cachefs.fuse.relay._relay.Table` that this module uses."""

    def publish(
        self,
        ino: int,
        block: int,
        file: int,
        offset: int,
        length: int,
        is_last: bool,
        checksum: int,
        /,
    ) -> None: ...
    def mark_whole(self, file: int, is_whole: bool, /) -> None: ...
    def verify_all(self, verify: bool, /) -> None: ...
    def withdraw(self, file: int, offset: int, /) -> None: ...
    def remove(self, ino: int, first: int, end: int, /) -> None: ...
    def revive(self, file: int, /) -> None: ...
    def withdraw_file(self, file: int, /) -> None: ...
    def drain(self, most: int, /) -> list[tuple[int, int, int, int]]: ...
    def take_file_hits(self, file: int, /) -> tuple[int, int]: ...


class Files(Protocol):
    """The connection to the relay: sends it descriptors of slab files, and orders to close them."""

    def send_file(self, file: int, fd: int, waits: bool, /) -> None:
        """Send the descriptor of slab file number `file`. The caller still owns `fd`. `waits` says
        that reads may wait for a disk."""

    def close_file(self, file: int, /) -> None: ...


class _Awaited(NamedTuple):
    """How to publish a block that is on its way into a tier."""

    ino: int
    is_last: bool


class _PublishedSlab(NamedTuple):
    """A slab that has a file number in the relay's table, and its store."""

    store: TierStore
    slab: Slab


class Publisher:
    """The blocks of one mount that the relay serves. Only the event loop uses this object. No
    method waits, except `run`."""

    def __init__(
        self,
        cache: BlockCache,
        table: Table,
        files: Files,
        key_of: Callable[[int, int], BlockKey | None],
        most_lent: int | None = None,
    ) -> None:
        """`key_of(ino, block)` returns the key of a block, None if it is unknown. `most_lent` is
        the number of slab descriptors that the relay can hold; the default is as many as this
        process (`descriptors_for_slabs`)."""
        self._cache = cache
        self._table = table
        self._files = files
        self._key_of = key_of
        self._slabs: dict[int, _PublishedSlab] = {}
        self._next_file = 0
        self._most_lent = descriptors_for_slabs() if most_lent is None else most_lent
        self._lent: OrderedDict[int, None] = OrderedDict()
        """Files whose descriptors the relay holds. It passes READs of other files to the daemon."""
        self._loans_left = _LOANS
        self._awaited: OrderedDict[BlockKey, _Awaited] = OrderedDict()
        self._whole: set[int] = set()
        """Files that are marked in the table as whole objects."""
        self.is_current: Callable[[int, bytes], bool] | None = None
        """In a writable mount: whether the content of an inode is this object (by id). An inode
        that changes has another object afterwards, and only that one may be published."""
        table.verify_all(cache.verify_full)
        cache.partial_checksums.share(table)
        cache.tell_admitted(self._admitted)
        cache.object_slabs.on_complete = self._mark_if_complete

    def publish(self, ino: int, ref: ObjectRef, offset: int, length: int) -> None:
        """Publish the blocks of a file range that the daemon serves, so that the relay can serve
        the next read.

        Only a verified block is published. Every other block is remembered, and published when a
        tier stores it.
        """
        if self.is_current is not None and not self.is_current(ino, ref.object_id):
            return
        slabs = self._cache.object_slabs
        if slabs.wants(ref):
            slabs.note_inode(ino, ref)
            slabs.note_read(ref, offset + length >= ref.meta.size_bytes)
        end = min(-(-(offset + length) // BLOCK_BYTES), ref.block_count)
        for block in range(offset // BLOCK_BYTES, end):
            key = BlockKey(ref.object_id, block)
            is_last = block == ref.block_count - 1
            found = self._cache.find_verified(key)
            if found is not None:
                self._publish_block(ino, key, *found, is_last)
                continue
            self._awaited[key] = _Awaited(ino, is_last)
            self._awaited.move_to_end(key)
            if len(self._awaited) > _AWAITED:
                self._awaited.popitem(last=False)

    @property
    def large_bytes(self) -> float:
        """From which size on the kernel may open files by itself; infinite if it never may."""
        return self._cache.object_slabs.least_bytes

    def note_entry(self, ino: int, ref: ObjectRef) -> None:
        """Note that the kernel gets the entry of this large file, and may open it next."""
        self._cache.object_slabs.note_inode(ino, ref)
        self._mark_if_complete(ref.object_id)

    def _mark_if_complete(self, object_id: bytes) -> None:
        """Let the kernel open the file of an object by itself, if it is complete. The relay gets
        the file even if the kernel doesn't know its name yet: it should be there before an open."""
        found = self._cache.object_slabs.find(object_id)
        if found is None or found[1].relay_file in self._whole or not found[1].is_complete:
            return
        key = BlockKey(object_id, 0)
        store, slab = found
        if slab.relay_file < 0 and not self._add_file(store, slab):
            return
        ino, location = self._cache.object_slabs.inos.get(object_id), store.find_verified(key)
        if ino is None or location is None or location.slab != slab.slab_id:
            return
        self._publish_block(ino, key, store, location, is_last=slab.slot_count == 1)
        self._whole.add(slab.relay_file)
        self._table.mark_whole(slab.relay_file, True)

    def publish_ahead(self, ino: int, ref: ObjectRef, blocks: range) -> None:
        """Let the relay serve blocks that are on their way, and will probably be read in order,
        except some, by which this process sees how far the reader is."""
        if self.is_current is not None and not self.is_current(ino, ref.object_id):
            return
        for block in blocks:
            if block % SEEN_EVERY:
                key = BlockKey(ref.object_id, block)
                self._awaited[key] = _Awaited(ino, block == ref.block_count - 1)
                self._awaited.move_to_end(key)
        while len(self._awaited) > _AWAITED:
            self._awaited.popitem(last=False)

    def _admitted(self, store: TierStore, key: BlockKey, location: BlockLocation) -> None:
        """Publish a block that a tier has just stored, if a reader has requested it; and the file
        of its object, if it was the last block."""
        slab = store.slabs.by_id[location.slab]
        if slab.whole is not None and slab.used_count == slab.slot_count:
            self._mark_if_complete(key.object_id)
        awaited = self._awaited.pop(key, None)
        if awaited is None:
            return
        if self.is_current is None or self.is_current(awaited.ino, key.object_id):
            self._publish_block(awaited.ino, key, store, location, awaited.is_last)

    def _publish_block(
        self, ino: int, key: BlockKey, store: TierStore, location: BlockLocation, is_last: bool
    ) -> None:
        slab = store.slabs.by_id[location.slab]
        if slab.relay_file < 0 and not self._add_file(store, slab):
            return
        if slab.relay_file not in self._lent:
            self._lend(store, slab)
        offset = slab.layout.slot_offset(location.slot)
        block = key.block_index
        self._table.publish(
            ino, block, slab.relay_file, offset, location.length, is_last, location.checksum
        )

    def withdraw(self, ino: int, block_count: int) -> None:
        """Let the relay serve none of the file's blocks: a process changes the file."""
        self._table.remove(ino, 0, block_count)

    def _add_file(self, store: TierStore, slab: Slab) -> bool:
        if self._next_file >= _FILES or slab.fd < 0:
            return False
        file = self._next_file
        self._next_file += 1
        slab.relay_file = file
        self._slabs[file] = _PublishedSlab(store, slab)
        store.slabs.on_freed = self._withdraw_slot
        store.slabs.on_withdrawn = self._withdraw_slab
        self._lend(store, slab)
        self._table.revive(file)
        return True

    def _lend(self, store: TierStore, slab: Slab) -> None:
        """Send the slab's descriptor to the relay. If the relay holds the maximum already, replace
        one that it has not used lately."""
        if slab.fd < 0:
            return
        if len(self._lent) >= self._most_lent:
            if self._loans_left == 0:
                return
            self._loans_left -= 1
            self._files.close_file(self._least_used())
        self._lent[slab.relay_file] = None
        self._files.send_file(slab.relay_file, slab.fd, store.directory.medium is not Medium.MEM)

    def _least_used(self) -> int:
        """Remove one file from `_lent` and return it: the one lent longest ago of those with no
        hit since the last count. After `_LOOKS` files with hits, take the oldest."""
        for _ in range(min(len(self._lent), _LOOKS)):
            file, _ = self._lent.popitem(last=False)
            if not self._count_hits(file, self._slabs[file]) and file not in self._whole:
                return file
            self._lent[file] = None
        return self._lent.popitem(last=False)[0]

    def _withdraw_slot(self, slab: Slab, slot: int) -> None:
        if slab.relay_file in self._whole:
            self._whole.discard(slab.relay_file)
            self._table.mark_whole(slab.relay_file, False)
        self._table.withdraw(slab.relay_file, slab.layout.slot_offset(slot))

    def _withdraw_slab(self, slab: Slab) -> None:
        file = slab.relay_file
        self._whole.discard(file)
        self._table.withdraw_file(file)
        self._count_hits(file, self._slabs.pop(file))
        if file in self._lent:
            del self._lent[file]
            self._files.close_file(file)

    # -- what the relay did ----------------------------------------------------------------------

    async def run(self) -> None:
        """Report the relay's hits to the policies every `_SYNC_S`. Never returns."""
        while True:
            await trio.sleep(_SYNC_S)
            self._loans_left = _LOANS
            while self.note_hits() == _HITS:
                await trio.lowlevel.checkpoint()

    def note_hits(self) -> int:
        """Report up to `_HITS` new hits of the relay to the policies. Return their number."""
        hits = self._table.drain(_HITS)
        for ino, block, file, offset in hits:
            published = self._slabs.get(file)
            if published is None:
                continue
            store, slab = published
            slot = (offset - slab.data_offset) // slab.slot_bytes
            if slab.holds(slot):
                key = self._key_of(ino, block) if store.on_lower_hit is not None else None
                store.hit_elsewhere(slab, slot, key)
                if slab.whole is not None and block == 0:
                    store.note_open(slab)
        return len(hits)

    def count_hits(self) -> None:
        """Add the relay's hits since the last call to the counters of tiers and cache."""
        for file, published in self._slabs.items():
            self._count_hits(file, published)

    def _count_hits(self, file: int, published: _PublishedSlab) -> int:
        """Add the new hits of one file to the counters. Return their number."""
        hits, hit_bytes = self._table.take_file_hits(file)
        if hits:
            for counters in (published.store.counters, self._cache.counters):
                counters.hits += hits
                counters.hit_bytes += hit_bytes
        return hits
