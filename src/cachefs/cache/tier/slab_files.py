"""The slab files of a tier: list them, open them, and reconcile them after a crash.

The start opens no file. The first read of a slab opens it. A slab must be *reconciled* before its
slots are allocated or freed: after a crash, slots, index and slot table may disagree. In a
reconciled slab these invariants hold. Only damage can break them, because the daemon keeps index
row, slot and table entry consistent when it stores or drops a block:
- the table entry of a used slot names the one block whose index row points back to the slot;
- `used_bytes` is the sum of the lengths of those blocks.
Other index rows may point to the slot too. The cache serves no read from such a row and moves no
block because of it (`TierStore.read_slot`, `Mover`): a slot is freed only for its own block, with
the length of that block.
"""

import contextlib
import errno
import logging
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from cachefs.cache.counters import TierCounters
from cachefs.cache.tier.disk_threads import DiskThreads, OverdueError
from cachefs.cache.tier.index import Index
from cachefs.cache_dir.directory import CacheDirectory, OpenedSlab
from cachefs.cache_dir.open_slabs import OpenSlabs
from cachefs.cache_dir.slab import FREE, Slab
from cachefs.format.index_record import NO_CLASS
from cachefs.format.slab import WholeObject, entry_at
from cachefs.types import BlockLocation

log = logging.getLogger(__name__)

_OUT_OF_FDS = (errno.EMFILE, errno.ENFILE)
_OPEN_ATTEMPTS = 4
"""Must exceed the number of errors that make a disk unusable (`cache_dir/health.py`)."""
_STEP_SLOTS = 256
"""Most slots to reconcile in one turn of the event loop. Each takes about 3 us."""


class SlabFiles:
    """The slab files of one tier; its `TierStore` owns the object.

    The constructor reads only the slab rows of the index and the names of the files.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        index: Index,
        io: DiskThreads,
        counters: TierCounters,
        clock: Callable[[], int],
        open_slabs: OpenSlabs,
    ) -> None:
        self.closed = False
        self.open_slabs = open_slabs
        """Open slab files of the whole mount; all its tiers share this object."""
        self._directory = directory
        self._slabs = directory.slabs
        self._by_id = directory.slabs.by_id
        self._index = index
        self._io = io
        self._counters = counters
        self._clock = clock
        self._stale_rows: dict[int, Slab] = {}
        self._failed_opens: Counter[int] = Counter()
        self._under_way: dict[int, trio.Event] = {}
        self._opened: dict[int, OpenedSlab] = {}
        """Files that a reader thread has opened and no task has installed yet. A file whose task
        was cancelled stays here for the next one."""
        self._lost_tables: set[int] = set()
        """Slabs of which a crash has left only the table file. Their ids are not used again."""
        self._late: set[int] = set()
        """Slabs whose last open took longer than the patience of a reader."""
        index.before_commit(self._put_rows)
        has_crashed = not index.take_clean_mark()
        self._load()
        self.must_reconcile = has_crashed and bool(self._by_id)
        """The last daemon crashed, so index, slot tables and slots may differ."""
        if self.must_reconcile:
            index.note_crash()
        self.may_have_stale_rows = index.has_seen_crash
        """A daemon has crashed on this directory at least once. Index rows may point to slots that
        hold another block. Such a row stays until a read requests its block."""

    def _load(self) -> None:
        """Create the slabs from index rows and file names only, so that a start scans no file."""
        on_disk, of_tables = self._directory.files_on_disk()
        self._lost_tables = of_tables - on_disk
        lost = []
        for slab_id, row in self._index.slab_rows():
            if slab_id in on_disk:
                on_disk.discard(slab_id)
                self._slabs.add(slab_id, row)
            else:
                lost.append(slab_id)
        for slab_id in lost:
            self._index.delete_slab(slab_id)
        self._slabs.skip_ids(self._index.next_slab_id)
        self._slabs.skip_ids(max(self._lost_tables, default=-1) + 1)
        self._counters.bad_slabs += len(lost)
        for slab_id in on_disk:
            self._slabs.add(slab_id)
        for slab in self._by_id.values():
            slab.load_ticks = self._load_ticks

    def _load_ticks(self, slab: Slab) -> "array[int] | None":
        return self._index.recency(slab.slab_id, slab.class_index, slab.slot_count)

    def take_id(self) -> int:
        """Return the id for a new slab. No id is used twice: after a slab is lost, index rows of
        its blocks still name its id, and each row stays until a read requests its block."""
        slab_id = self._slabs.take_id()
        self._index.put_next_slab_id(slab_id + 1)
        return slab_id

    # -- rows ----------------------------------------------------------------------------------

    def put_row(self, slab: Slab) -> None:
        """Write the slab's row with the next commit. This call only marks the slab."""
        self._stale_rows[slab.slab_id] = slab

    def _put_rows(self) -> None:
        for slab_id, slab in self._stale_rows.items():
            if self._by_id.get(slab_id) is slab:
                self._index.put_slab(slab_id, slab.row())
        self._stale_rows.clear()

    # -- opening -------------------------------------------------------------------------------

    async def open(self, slab: Slab) -> bool:
        """Open the slab's file if it is closed. Afterwards the blocks that the index places in the
        slab can be read.

        Return False if the file cannot be opened now: no descriptor is free, or the disk fails or
        takes too long. After this call the caller must check everything again: the slab may have
        been removed (file missing), may have lost its class (header damaged or of another slab),
        or may have another class than its row said (the header wins).
        """
        return await self._one_at_a_time(slab, lambda: slab.fd >= 0, self._open)

    async def reconcile(self, slab: Slab) -> bool:
        """Open the slab and, after a crash, reconcile it. Call this before slots are allocated or
        deliberately freed. It tries again if `open` takes too long on a usable disk. For the
        result, and for what may have changed, see `open`."""
        if slab.is_ready:
            return True
        while not await self.open(slab):
            if slab.slab_id not in self._late or not self._io.health.usable:
                return False
        if slab.fd < 0:
            return True
        return await self._one_at_a_time(slab, lambda: slab.is_reconciled, self._reconcile)

    async def _one_at_a_time(
        self, slab: Slab, is_done: Callable[[], bool], do: Callable[[Slab], Awaitable[bool]]
    ) -> bool:
        while not is_done():
            under_way = self._under_way.get(slab.slab_id)
            if under_way is None:
                done = self._under_way[slab.slab_id] = trio.Event()
                try:
                    return await do(slab)
                finally:
                    del self._under_way[slab.slab_id]
                    done.set()
            await under_way.wait()
            if not self._is_ours(slab):
                return True
        return True

    def _is_ours(self, slab: Slab) -> bool:
        return self._by_id.get(slab.slab_id) is slab and not self.closed

    async def _open(self, slab: Slab) -> bool:
        try:
            if slab.slab_id not in self._opened:
                await self._io.read_patiently(
                    lambda: None, 0, partial(self._open_into, slab.slab_id)
                )
        except OverdueError:
            self._late.add(slab.slab_id)
            return False
        except OSError as error:
            self._late.discard(slab.slab_id)
            if error.errno in _OUT_OF_FDS:
                self.report(slab, "can't be opened: too many open files")
                return False
            return await self._cant_open(slab, error)
        self._late.discard(slab.slab_id)
        opened = self._opened.pop(slab.slab_id)
        if slab.whole not in (None, opened.whole):
            opened.close()
            await self._lose(slab, "has a table that is damaged or another slab's")
        else:
            self._install(slab, opened)
        return True

    def _open_into(self, slab_id: int) -> None:
        """Run in a reader thread. It may end long after all waiting tasks have given up."""
        self._opened[slab_id] = self._directory.open_slab(slab_id)

    def _install(self, slab: Slab, opened: OpenedSlab) -> None:
        if not self._is_ours(slab):
            opened.close()
            return
        slab.fd, slab.table_fd, slab.mask = opened.fd, opened.table_fd, opened.mask
        self.open_slabs.note(slab)
        if not slab.was_opened:
            slab.was_opened = True
            slab.is_reconciled = not self.must_reconcile
        if opened.whole is not None:
            self._install_whole(slab, opened.whole)
        elif opened.header is None:
            # A blank header in a slab without a class is no damage: it never held a block.
            if not opened.is_blank or slab.class_index != NO_CLASS:
                self._counters.bad_slabs += 1
                text = "the header is damaged or another slab's; its blocks are dropped"
                self.report(slab, text)
            self._slabs.reformat(slab, None, self._clock())
            self.put_row(slab)
            slab.is_reconciled = True
        elif opened.header.class_index != slab.class_index:
            self._slabs.reformat(slab, opened.header.class_index, self._clock())
            self.put_row(slab)
            slab.is_reconciled = False
        slab.hydrate()

    def _install_whole(self, slab: Slab, whole: WholeObject) -> None:
        """Make a slab without a row, whose file holds an object, the slab of this object."""
        if slab.whole is None:
            if slab.class_index != NO_CLASS:
                self._slabs.reformat(slab, None, self._clock())
            self._slabs.make_whole(slab, whole, self._clock())
            self.put_row(slab)
            slab.is_reconciled = False
        slab.hydrate()

    # -- after a crash -------------------------------------------------------------------------

    async def _reconcile(self, slab: Slab) -> bool:
        if slab.fd < 0:  # it was closed while this task waited for another one
            return False
        with slab.in_use():
            return await self._reconcile_open(slab)

    async def _reconcile_open(self, slab: Slab) -> bool:
        layout = slab.layout
        try:
            table = await self._io.read(
                layout.table_bytes, self._directory.read_table, slab.table_fd, layout
            )
        except OSError:
            self._counters.read_errors += 1
            if self._may_get_better(slab):
                return False
            table = b""  # without the table, no slot can be matched with its block
        lengths = array("I", [0]) * layout.slot_count
        for first in range(0, layout.slot_count, _STEP_SLOTS):
            if slab.layout is not layout or not self._is_ours(slab):
                return True
            for slot in range(first, min(first + _STEP_SLOTS, layout.slot_count)):
                lengths[slot] = self._reconcile_slot(slab, slot, table)
            self.put_row(slab)
            if first + _STEP_SLOTS < layout.slot_count:
                await trio.lowlevel.checkpoint()
        used_bytes = sum(lengths[slot] for slot in slab.used_slots())
        self._slabs.set_used_bytes(slab, used_bytes)
        slab.is_reconciled = True
        return True

    def _reconcile_slot(self, slab: Slab, slot: int, table: bytes) -> int:
        """Reconcile one slot. Return the length of its block in bytes, 0 if it holds none.

        The slot keeps the block of its table entry if that block's index row points here. If the
        index has no row for the block, the slot adopts it, not yet verified.
        """
        if slab.state[slot] != FREE and not slab.holds(slot):
            return 0
        entry = entry_at(table, slot, slab.mask)
        found = location = None
        if entry is not None and entry.length <= slab.slot_bytes:
            location = BlockLocation(slab.slab_id, slot, entry.length, entry.checksum)
            found = self._index.locate(entry.key)
        if slab.holds(slot):
            if location is not None and found == location:
                return location.length
            self._slabs.free(slab, slot, 0)
        if entry is None or location is None or found not in (None, location):
            return 0
        if not self._slabs.adopt(slab, slot, entry.length):
            return 0
        self._index.put(entry.key, location)
        self._counters.adopted += 1
        return entry.length

    async def reconcile_all(self) -> None:
        """Reconcile the slabs without a row, and after a crash all slabs. This runs in the
        background while the cache already serves reads.

        Slabs without a row come first. They were created in the last second before the crash, and
        no index row leads a read to their blocks.
        """
        for slab_id in self._lost_tables:
            with contextlib.suppress(OSError):
                await self._io.write(0, self._directory.delete_slab, slab_id)
        orphans = [slab for slab in self._by_id.values() if slab.class_index == NO_CLASS]
        reconciled = [await self.reconcile(slab) for slab in orphans]
        for slab in list(self._by_id.values()) if self.must_reconcile else ():
            if not await self.reconcile(slab):
                return  # each other slab is reconciled when it is needed
        self.must_reconcile = not all(reconciled)

    # -- files that can't be opened ------------------------------------------------------------

    async def _cant_open(self, slab: Slab, error: OSError) -> bool:
        """Remove the slab, unless the disk as a whole may be the cause of the error."""
        if error.errno == errno.EIO and self._may_get_better(slab):
            return False
        await self._lose(slab, f"can't be opened: {error.strerror}")
        return True

    def _may_get_better(self, slab: Slab) -> bool:
        """Return whether the disk, and not this file, may be the cause of the error."""
        self._failed_opens[slab.slab_id] += 1
        return not self._io.health.usable or self._failed_opens[slab.slab_id] < _OPEN_ATTEMPTS

    async def _lose(self, slab: Slab, why: str) -> None:
        """Remove a slab whose file cannot be used. Its index rows stay; each is dropped when a
        read requests the block."""
        if self._by_id.get(slab.slab_id) is not slab or slab.fd >= 0:
            return
        self._counters.bad_slabs += 1
        self.report(slab, f"{why}; its blocks are dropped")
        self._slabs.remove(slab)
        self._index.delete_slab(slab.slab_id)
        # Whatever has the file's name now would use space that no quota counts.
        with contextlib.suppress(OSError):
            await self._io.read(0, self._directory.delete_slab, slab.slab_id)

    def report(self, slab: Slab, text: str) -> None:
        """Log a warning about the slab, once per slab."""
        if not slab.reported:
            slab.reported = True
            log.warning("%s: %s", self._directory.paths.slab(slab.slab_id), text)

    def close(self) -> None:
        """Close the files that no task has installed. The tier owns the descriptors of open
        slabs."""
        self.closed = True
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
