"""The slots of one tier: which are free, which hold a block, and which can't be reused yet.

No I/O and no waiting: every method is atomic on the loop thread. The states of a slot are

    FREE -> WRITING -> USED -> FREE
                  \\-> FREE  \\-> ZOMBIE -> FREE     (freed while a worker thread reads it)

PINNED is the state of a used slot whose block a user has pinned. An evictable block has the
state USED: a search for these (`evictable_slots`) skips pinned ones at no cost. A reference
prevents the reuse of a slot while a thread reads it; it does not prevent eviction.

Invariants (checked by tests/unit/test_slabs.py):
- `allocate` returns a slot only while it is FREE, so two blocks never share one;
- in each slab, `free_count` is the number of FREE slots, `used_count` of USED and PINNED slots, and
  `pinned_count` of PINNED slots;
- `_open[class]` contains a slab of the class exactly if it has a FREE slot and isn't draining;
- `spare` contains a slab if all its slots are FREE, or if it has no class, unless it is draining;
- `used_charge_bytes`, `pinned_charge_bytes`, `cached_blocks` and `cached_bytes` are the sums over
  all slabs.

The charge of a used slot is its share of the slab file (`slab_bytes / slot_count`, rounded down).
So a tier with all slots used has its whole quota charged, whatever the classes.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from cachefs.format.index_record import NO_CLASS, SlabRow, pack_bitmap, unpack_bitmap
from cachefs.format.slab import SLOT_CLASSES, SlabLayout, slab_layout

FREE, USED, WRITING, ZOMBIE, PINNED = 0, 1, 2, 3, 4
_PINNED_AS_USED = bytes(USED if state == PINNED else state for state in range(256))
_ONLY_PINNED = bytes(state == PINNED for state in range(256))

NEAR_CLASSES = 5
"""How many larger classes a block may use. From 4 KiB on, classes grow by an eighth at most, so
such a slot is at most 80 % larger than one of the block's own class."""

NO_LAYOUT = SlabLayout(NO_CLASS, 0, 0, 0)


class Slab:
    """One slab file; a `SlabSet` owns it. Uses 13 bytes of memory per slot once the slab is in use.

    `state[slot]` is the slot's state. `ticks[slot]` is the recency clock at the slot's last use;
    the eviction policy writes it. `verified[slot]` is the checksum that the slot's bytes had when
    they were verified since the daemon started; 0 if they were not verified. A reader may trust the
    bytes only if it expects the same checksum. So it is safe even if a damaged index has two keys
    that point to one slot."""

    __slots__ = (
        "_bitmap",
        "_hint",
        "_pinned_bitmap",
        "_references",
        "charge_bytes",
        "class_index",
        "data_offset",
        "draining",
        "fd",
        "free_count",
        "is_reconciled",
        "layout",
        "load_ticks",
        "pinned_count",
        "relay_file",
        "reported",
        "slab_bytes",
        "slab_id",
        "slot_bytes",
        "slot_count",
        "state",
        "tick",
        "ticks",
        "used_bytes",
        "used_count",
        "users",
        "verified",
        "was_opened",
        "was_read",
        "writing_count",
    )

    def __init__(self, slab_id: int, slab_bytes: int) -> None:
        self.slab_id = slab_id
        self.slab_bytes = slab_bytes
        self.fd = -1
        """Descriptor of the file; -1 while it is not open. `open_slabs.py` closes it."""
        self.was_opened = False
        """The file was opened since the daemon started, so its header has been read."""
        self.was_read = False
        """This daemon has read it lately (`open_slabs.py`)."""
        self.users = 0
        """How many `in_use` contexts need the open descriptor, besides references and writes."""
        self.relay_file = -1
        """The number of the file at the relay, if its blocks are published (`cache/publisher.py`);
        else -1."""
        self.reported = False
        """A bad block of this slab has already been logged."""
        self.is_reconciled = False
        """Slots, index and slot table agree (`cache/tier/slab_files.py`)."""
        self.load_ticks: Callable[[Slab], array[int] | None] = lambda _: None
        """Returns the ticks of an earlier run, or None; called when ticks are first needed."""
        self._references: dict[int, int] = {}
        self.format(NO_LAYOUT, tick=0)

    def format(self, layout: SlabLayout, tick: int) -> None:
        """Reset to an empty slab of `layout`. No slot may have a reference."""
        assert not self._references
        self.layout = layout
        self.class_index = layout.class_index
        self.slot_bytes = layout.slot_bytes
        self.slot_count = layout.slot_count
        self.data_offset = layout.data_offset
        self.charge_bytes = self.slab_bytes // layout.slot_count if layout.slot_count else 0
        self.free_count = layout.slot_count
        self.used_count = 0
        self.pinned_count = 0
        self.used_bytes = 0
        self.writing_count = 0
        self.draining = False
        self.tick = tick
        self._hint = 0
        self._bitmap: bytes | None = b"\0" * -(-layout.slot_count // 8)
        self._pinned_bitmap = b""
        self.state = bytearray()
        self.ticks = array("I")
        self.verified = array("Q")

    def restore(self, row: SlabRow, layout: SlabLayout) -> None:
        """Set the state from its index row. `hydrate` unpacks the bitmap at the first use."""
        self.format(layout, row.tick)
        self._bitmap = row.bitmap
        self._pinned_bitmap = row.pinned_bitmap
        self.pinned_count = int.from_bytes(row.pinned_bitmap, "little").bit_count()
        self.used_count = row.used_count
        self.used_bytes = row.used_bytes
        self.free_count = layout.slot_count - row.used_count

    def hydrate(self) -> None:
        """Unpack the per-slot arrays, if that has not been done."""
        if self._bitmap is None:
            return
        self.state = unpack_bitmap(self._bitmap, self.slot_count)
        if self.pinned_count:
            # All bytes at once: USED + 3 is PINNED, and nothing is carried into the next byte.
            used = int.from_bytes(self.state, "little")
            pinned = int.from_bytes(unpack_bitmap(self._pinned_bitmap, self.slot_count), "little")
            self.state = bytearray(
                (used + (PINNED - USED) * pinned).to_bytes(self.slot_count, "little")
            )
        self._bitmap = None
        self._pinned_bitmap = b""
        known = self.load_ticks(self)
        self.ticks = array("I", [self.tick]) * self.slot_count if known is None else known
        self.verified = array("Q", [0]) * self.slot_count

    def row(self) -> SlabRow:
        """Return the slab's row for the index."""
        tick = max(self.ticks) if self.ticks else self.tick
        bitmap, pinned = self._bitmap, self._pinned_bitmap
        if bitmap is None:
            bitmap = pack_bitmap(self.state.translate(_PINNED_AS_USED))
            if self.pinned_count:
                pinned = pack_bitmap(self.state.translate(_ONLY_PINNED))
        fields = (self.class_index, self.slot_count, self.used_count, tick, self.used_bytes)
        return SlabRow(*fields, bitmap, pinned)

    def used_slots(self) -> Iterator[int]:
        """Iterate over the slots that hold a block, ascending; exhaust it before any change."""
        self.hydrate()
        return _find_all(self.state.translate(_PINNED_AS_USED), 0, self.slot_count)

    def evictable_slots(self, first: int = 0, stop: int | None = None) -> Iterator[int]:
        """Iterate over the evictable slots in [first, stop), ascending.

        Exhaust the iterator before any change.
        """
        self.hydrate()
        end = self.slot_count if stop is None else min(stop, self.slot_count)
        return _find_all(self.state, first, end)

    def pinned_slots(self, count: int) -> Iterator[int]:
        """Iterate over the first `count` pinned slots, ascending; exhaust it before any change."""
        self.hydrate()
        return islice(_find_all(self.state, 0, self.slot_count, PINNED), count)

    @property
    def evictable_count(self) -> int:
        """Number of evictable blocks."""
        return self.used_count - self.pinned_count

    def holds(self, slot: int) -> bool:
        """Whether the slot holds a block."""
        if slot >= self.slot_count:
            return False
        self.hydrate()
        return self.state[slot] in (USED, PINNED)

    def is_evictable(self, slot: int) -> bool:
        """Whether the slot holds an evictable block."""
        return self.holds(slot) and self.state[slot] == USED

    def is_pinned(self, slot: int) -> bool:
        """Whether the slot holds a pinned block. Does not unpack the per-slot arrays."""
        if self.pinned_count == 0 or slot >= self.slot_count:
            return False
        if self._bitmap is not None:
            return bool(self._pinned_bitmap[slot >> 3] >> (slot & 7) & 1)
        return self.state[slot] == PINNED

    @property
    def is_ready(self) -> bool:
        """Whether the file is open, and slots, index and slot table agree."""
        return self.fd >= 0 and self.is_reconciled

    @property
    def is_busy(self) -> bool:
        """Whether a task or a thread may be using the descriptor."""
        return bool(self._references or self.writing_count or self.users)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the descriptor open, for a task that awaits between two uses of it."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def is_empty(self) -> bool:
        """Whether no slot is used, written, or read by a thread."""
        return self.free_count == self.slot_count and not self._references

    def add_reference(self, slot: int) -> None:
        """Add a reference, which is counted: the slot is not reused before
        `SlabSet.drop_reference`."""
        self._references[slot] = self._references.get(slot, 0) + 1


def _find_all(states: bytearray, first: int, end: int, wanted: int = USED) -> Iterator[int]:
    slot = states.find(wanted, first, end)
    while slot >= 0:
        yield slot
        slot = states.find(wanted, slot + 1, end)


class Allocation(NamedTuple):
    """A slot that `SlabSet.allocate` has returned."""

    slab: Slab
    slot: int


class SlabSet:
    """All slabs of one tier, and the sums over them. The `Tier` owns it."""

    def __init__(self, slab_bytes: int, max_slabs: int) -> None:
        self.slab_bytes = slab_bytes
        self.max_slabs = max_slabs
        self.by_id: dict[int, Slab] = {}
        self.used_charge_bytes = 0
        self.pinned_charge_bytes = 0
        self.cached_blocks = 0
        self.cached_bytes = 0
        self._open: list[dict[int, Slab]] = [{} for _ in SLOT_CLASSES]
        self._of_class: list[dict[int, Slab]] = [{} for _ in SLOT_CLASSES]
        self.spare: dict[int, Slab] = {}
        """Slab id -> slab, of the slabs that any class may take."""
        self._next_id = 0
        self.on_freed: Callable[[Slab, int], None] = lambda slab, slot: None
        """Called when a slot of a published slab is freed, before the slot is used again."""
        self.on_withdrawn: Callable[[Slab], None] = lambda slab: None
        """Called before a published slab loses all its blocks or is withdrawn."""

    def withdraw(self, slab: Slab) -> None:
        """End the publication of the slab's blocks to the relay."""
        if slab.relay_file >= 0:
            self.on_withdrawn(slab)
            slab.relay_file = -1

    def withdraw_all(self) -> None:
        """`withdraw` all slabs."""
        for slab in self.by_id.values():
            self.withdraw(slab)

    @property
    def capacity_bytes(self) -> int:
        """The part of the quota that whole slabs can fill."""
        return self.max_slabs * self.slab_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of all slab files."""
        return len(self.by_id) * self.slab_bytes

    def take_id(self) -> int:
        """Return a new slab id: not below `skip_ids`, and not used since the directory was
        opened."""
        self._next_id += 1
        return self._next_id - 1

    def skip_ids(self, next_id: int) -> None:
        """Make `take_id` return no id below `next_id`."""
        self._next_id = max(self._next_id, next_id)

    def add(self, slab_id: int, row: SlabRow | None = None) -> Slab:
        """Add a slab file that exists on disk, and return its slab.

        If the row is missing or wrong, the slab has no class and no slots.
        """
        slab = Slab(slab_id, self.slab_bytes)
        if row is not None and row.class_index < len(SLOT_CLASSES):
            layout = slab_layout(row.class_index, self.slab_bytes)
            if layout.slot_count == row.slot_count:
                slab.restore(row, layout)
        self.by_id[slab_id] = slab
        self.skip_ids(slab_id + 1)
        self._count(slab, 1)
        self._sort_in(slab)
        return slab

    def remove(self, slab: Slab) -> None:
        """Remove a slab whose file is gone."""
        self.withdraw(slab)
        self._count(slab, -1)
        self._sort_out(slab)
        del self.by_id[slab.slab_id]

    def reformat(self, slab: Slab, class_index: int | None, tick: int) -> None:
        """Reset the slab to an empty one of the given class, or without a class if None."""
        self.withdraw(slab)
        self._count(slab, -1)
        self._sort_out(slab)
        layout = NO_LAYOUT if class_index is None else slab_layout(class_index, self.slab_bytes)
        slab.format(layout, tick)
        self._count(slab, 1)
        self._sort_in(slab)

    def spare_slab(self) -> Slab | None:
        """Return an empty slab that any class may take and no thread reads, or None."""
        return next((slab for slab in self.spare.values() if slab.is_empty()), None)

    def slabs_of(self, class_index: int) -> list[Slab]:
        """Return all slabs of the class; an empty list if there is no such class."""
        return [
            slab for of in self._of_class[class_index : class_index + 1] for slab in of.values()
        ]

    def open_slab(self, class_index: int) -> Slab | None:
        """Return a slab of the class with a free slot, or None."""
        return next(iter(self._open[class_index].values()), None)

    def open_slab_near(self, class_index: int) -> Slab | None:
        """Return a slab with a free slot, of the class or of the next larger ones, or None."""
        for near in self._open[class_index : class_index + 1 + NEAR_CLASSES]:
            if near:
                return next(iter(near.values()))
        return None

    def allocate(self, slab: Slab) -> int:
        """Return a free slot, in the state WRITING. `commit` or `abort` must follow.

        `open_slab` must have returned the slab with no await since.
        """
        slab.hydrate()
        slot = slab.state.find(FREE, slab._hint)
        if slot < 0:
            slot = slab.state.find(FREE)
        slab.state[slot] = WRITING
        slab.verified[slot] = 0
        slab._hint = slot + 1
        slab.free_count -= 1
        slab.writing_count += 1
        self.spare.pop(slab.slab_id, None)
        if slab.free_count == 0:
            self._sort_out(slab)
        return slot

    def commit(self, slab: Slab, slot: int, length: int, checksum: int) -> None:
        """Mark a written slot as used; `checksum` is that of the bytes written."""
        assert slab.state[slot] == WRITING
        slab.state[slot] = USED
        slab.verified[slot] = checksum
        slab.writing_count -= 1
        self._add_block(slab, length)

    def abort(self, slab: Slab, slot: int) -> None:
        """Free a slot whose block is not stored."""
        assert slab.state[slot] == WRITING
        slab.writing_count -= 1
        self._release(slab, slot)

    def adopt(self, slab: Slab, slot: int, length: int) -> bool:
        """Mark a slot as used whose block was found in the slot table. Returns False if the slot
        was not FREE."""
        slab.hydrate()
        if slab.state[slot] != FREE:
            return False
        slab.state[slot] = USED
        slab.free_count -= 1
        self.spare.pop(slab.slab_id, None)
        if slab.free_count == 0:
            self._sort_out(slab)
        self._add_block(slab, length)
        return True

    def free(self, slab: Slab, slot: int, length: int) -> None:
        """Drop the block of a used slot. The slot becomes FREE at once, or ZOMBIE until its last
        reference is gone."""
        assert slab.state[slot] in (USED, PINNED)
        self.unpin(slab, slot)
        if slab.relay_file >= 0:
            self.on_freed(slab, slot)
        slab.verified[slot] = 0
        if slab.used_count == 1:
            length = slab.used_bytes  # a damaged table may have given wrong lengths of others
        length = min(length, slab.used_bytes)
        slab.used_count -= 1
        slab.used_bytes -= length
        self.used_charge_bytes -= slab.charge_bytes
        self.cached_blocks -= 1
        self.cached_bytes -= length
        if slot in slab._references:
            slab.state[slot] = ZOMBIE
        else:
            self._release(slab, slot)

    def pin(self, slab: Slab, slot: int) -> bool:
        """Pin the block of a used slot. Returns False if it was pinned, or if there is no block."""
        slab.hydrate()
        if slab.state[slot] != USED:
            return False
        slab.state[slot] = PINNED
        slab.pinned_count += 1
        self.pinned_charge_bytes += slab.charge_bytes
        return True

    def unpin(self, slab: Slab, slot: int) -> bool:
        """Unpin the block of a slot. Returns False if it was not pinned."""
        slab.hydrate()
        if slab.state[slot] != PINNED:
            return False
        slab.state[slot] = USED
        slab.pinned_count -= 1
        self.pinned_charge_bytes -= slab.charge_bytes
        return True

    def set_used_bytes(self, slab: Slab, used_bytes: int) -> None:
        """Correct the slab's `used_bytes` after a count of its blocks."""
        self.cached_bytes += used_bytes - slab.used_bytes
        slab.used_bytes = used_bytes

    def drop_reference(self, slab: Slab, slot: int) -> None:
        """Remove a reference (`Slab.add_reference`). The last one frees a ZOMBIE slot."""
        slab._references[slot] -= 1
        if slab._references[slot] == 0:
            del slab._references[slot]
            if slab.state[slot] == ZOMBIE:
                self._release(slab, slot)

    def drain(self, slab: Slab) -> None:
        """Allocate no more slots of this slab until `reformat`, `remove` or `undrain`."""
        slab.draining = True
        self._sort_out(slab)

    def undrain(self, slab: Slab) -> None:
        """Allow allocation of the slab's slots again."""
        slab.draining = False
        self._sort_in(slab)

    def free_charge_by_class(self) -> dict[int, int]:
        """Return, for each class that has a slab, the charge of its free slots in bytes."""
        totals: dict[int, int] = {}
        for slab in self.by_id.values():
            if slab.class_index != NO_CLASS:
                free = slab.free_count * slab.charge_bytes
                totals[slab.class_index] = totals.get(slab.class_index, 0) + free
        return totals

    def _release(self, slab: Slab, slot: int) -> None:
        slab.state[slot] = FREE
        slab.free_count += 1
        self._sort_in(slab)

    def _add_block(self, slab: Slab, length: int) -> None:
        slab.used_count += 1
        slab.used_bytes += length
        self.used_charge_bytes += slab.charge_bytes
        self.cached_blocks += 1
        self.cached_bytes += length

    def _count(self, slab: Slab, sign: int) -> None:
        self.used_charge_bytes += sign * slab.used_count * slab.charge_bytes
        self.pinned_charge_bytes += sign * slab.pinned_count * slab.charge_bytes
        self.cached_blocks += sign * slab.used_count
        self.cached_bytes += sign * slab.used_bytes
        if slab.class_index != NO_CLASS:
            if sign > 0:
                self._of_class[slab.class_index][slab.slab_id] = slab
            else:
                del self._of_class[slab.class_index][slab.slab_id]

    def _sort_in(self, slab: Slab) -> None:
        if slab.draining:
            return
        if slab.free_count == slab.slot_count:
            self.spare[slab.slab_id] = slab
        if slab.free_count and slab.class_index != NO_CLASS:
            self._open[slab.class_index][slab.slab_id] = slab

    def _sort_out(self, slab: Slab) -> None:
        self.spare.pop(slab.slab_id, None)
        if slab.class_index != NO_CLASS:
            self._open[slab.class_index].pop(slab.slab_id, None)
