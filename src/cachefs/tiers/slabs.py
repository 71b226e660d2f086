"""The slots of one tier: which are free, which hold a block, which may not be reused yet.

Pure arithmetic, no I/O and no waiting: every method is atomic on the loop thread. A slot goes

    FREE -> WRITING -> USED -> FREE
                  \\-> FREE  \\-> ZOMBIE -> FREE     (freed while a worker thread reads it)

KEPT is USED for a block that a user wants never to be evicted: the state is the mark. Whoever looks
for blocks that may go looks for USED ones (`loose_slots`), and so passes over kept ones at no cost.

Invariants (checked by tests/unit/test_slabs.py):
- a slot is given out by `allocate` only while FREE, so no two blocks ever share one;
- `free_count` is the number of FREE slots, `used_count` of USED and KEPT ones, `kept_count` of
  KEPT ones, of each slab;
- a slab stands in `_open[class]` exactly if it has a FREE slot and isn't draining;
- a slab stands in `spare` if all its slots are FREE, or if it has no class, unless it drains;
- `used_charge_bytes`, `kept_charge_bytes`, `cached_blocks` and `cached_bytes` are the sums over all
  slabs.

A used slot is charged its share of the slab file (`slab_bytes / slot_count`, rounded down), so
that a tier whose slots are all used is charged its whole quota whatever the classes.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from cachefs.format.index_record import NO_CLASS, SlabRow, pack_bitmap, unpack_bitmap
from cachefs.format.slab import SLOT_CLASSES, SlabLayout, slab_layout

FREE, USED, WRITING, ZOMBIE, KEPT = 0, 1, 2, 3, 4
_KEPT_AS_USED = bytes(USED if state == KEPT else state for state in range(256))
_ONLY_KEPT = bytes(state == KEPT for state in range(256))

NEAR_CLASSES = 5
"""Classes grow by an eighth: a slot of one of these is larger by 80 % at most."""

NO_LAYOUT = SlabLayout(NO_CLASS, 0, 0, 0)


class Slab:
    """One slab file. Ten odd bytes of memory a slot, and only once the slab is in use.

    `ticks[slot]` is the recency clock of the slot's last use (written by the eviction policy).
    `proof[slot]` is the checksum that the slot's bytes were seen to have since the daemon
    started, 0 if none was checked: a reader may trust bytes only for the same checksum, which
    holds even if a damaged index has two keys point at one slot.
    """

    __slots__ = (
        "_bitmap",
        "_hint",
        "_kept_bitmap",
        "_pins",
        "agrees",
        "charge_bytes",
        "class_index",
        "data_offset",
        "draining",
        "fd",
        "free_count",
        "kept_count",
        "layout",
        "load_ticks",
        "proof",
        "reported",
        "shared_as",
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
        "was_opened",
        "was_read",
        "writing_count",
    )

    def __init__(self, slab_id: int, slab_bytes: int) -> None:
        self.slab_id = slab_id
        self.slab_bytes = slab_bytes
        self.fd = -1
        """-1 while it is not open; see `open_slabs.py` for when it is closed."""
        self.was_opened = False
        """Since the daemon started: what its header says is known."""
        self.was_read = False
        """Lately, by us (`open_slabs.py`)."""
        self.users = 0
        """Those who need the descriptor to stay open, beside pins and slots being written."""
        self.shared_as = -1
        """The number by which others know the file, who read blocks from it (`cache/sharing.py`);
        -1: nobody does."""
        self.reported = False
        """A bad block was logged already."""
        self.agrees = False
        """Slots, index and slot table do (`cache/slab_files.py`)."""
        self.load_ticks: Callable[[Slab], array[int] | None] = lambda _: None
        """Asked for the ticks of an earlier run when they are first needed."""
        self._pins: dict[int, int] = {}
        self.format(NO_LAYOUT, tick=0)

    def format(self, layout: SlabLayout, tick: int) -> None:
        """Forget everything and be an empty slab of `layout`. No slot may be pinned."""
        assert not self._pins
        self.layout = layout
        self.class_index = layout.class_index
        self.slot_bytes = layout.slot_bytes
        self.slot_count = layout.slot_count
        self.data_offset = layout.data_offset
        self.charge_bytes = self.slab_bytes // layout.slot_count if layout.slot_count else 0
        self.free_count = layout.slot_count
        self.used_count = 0
        self.kept_count = 0
        self.used_bytes = 0
        self.writing_count = 0
        self.draining = False
        self.tick = tick
        self._hint = 0
        self._bitmap: bytes | None = b"\0" * -(-layout.slot_count // 8)
        self._kept_bitmap = b""
        self.state = bytearray()
        self.ticks = array("I")
        self.proof = array("Q")

    def restore(self, row: SlabRow, layout: SlabLayout) -> None:
        """Be what the row says. The bitmap is unpacked only when the slab is first used."""
        self.format(layout, row.tick)
        self._bitmap = row.bitmap
        self._kept_bitmap = row.kept_bitmap
        self.kept_count = int.from_bytes(row.kept_bitmap, "little").bit_count()
        self.used_count = row.used_count
        self.used_bytes = row.used_bytes
        self.free_count = layout.slot_count - row.used_count

    def hydrate(self) -> None:
        """Unpack the per-slot arrays. The bitmap is the truth about the counts."""
        if self._bitmap is None:
            return
        self.state = unpack_bitmap(self._bitmap, self.slot_count)
        if self.kept_count:
            # All bytes at once: USED + 3 is KEPT, and nothing is carried into the next byte.
            used = int.from_bytes(self.state, "little")
            kept = int.from_bytes(unpack_bitmap(self._kept_bitmap, self.slot_count), "little")
            self.state = bytearray(
                (used + (KEPT - USED) * kept).to_bytes(self.slot_count, "little")
            )
        self._bitmap = None
        self._kept_bitmap = b""
        known = self.load_ticks(self)
        self.ticks = array("I", [self.tick]) * self.slot_count if known is None else known
        self.proof = array("Q", [0]) * self.slot_count

    def row(self) -> SlabRow:
        tick = max(self.ticks) if self.ticks else self.tick
        bitmap, kept = self._bitmap, self._kept_bitmap
        if bitmap is None:
            bitmap = pack_bitmap(self.state.translate(_KEPT_AS_USED))
            if self.kept_count:
                kept = pack_bitmap(self.state.translate(_ONLY_KEPT))
        fields = (self.class_index, self.slot_count, self.used_count, tick, self.used_bytes)
        return SlabRow(*fields, bitmap, kept)

    def used_slots(self) -> Iterator[int]:
        """Slots that hold a block, ascending. Not to be held over a change."""
        self.hydrate()
        return _find_all(self.state.translate(_KEPT_AS_USED), 0, self.slot_count)

    def loose_slots(self, first: int = 0, stop: int | None = None) -> Iterator[int]:
        """Slots that hold a block which may be evicted, ascending. Not to be held over a change."""
        self.hydrate()
        end = self.slot_count if stop is None else min(stop, self.slot_count)
        return _find_all(self.state, first, end)

    def kept_slots(self, count: int) -> Iterator[int]:
        """The first slots whose block must not be evicted. Not to be held over a change."""
        self.hydrate()
        return islice(_find_all(self.state, 0, self.slot_count, KEPT), count)

    @property
    def loose_count(self) -> int:
        """Blocks that may be evicted."""
        return self.used_count - self.kept_count

    def holds(self, slot: int) -> bool:
        if slot >= self.slot_count:
            return False
        self.hydrate()
        return self.state[slot] in (USED, KEPT)

    def is_loose(self, slot: int) -> bool:
        """The slot holds a block that may be evicted."""
        return self.holds(slot) and self.state[slot] == USED

    def keeps(self, slot: int) -> bool:
        """The slot holds a block that must not be evicted. Costs nothing if the slab isn't in
        use."""
        if self.kept_count == 0 or slot >= self.slot_count:
            return False
        if self._bitmap is not None:
            return bool(self._kept_bitmap[slot >> 3] >> (slot & 7) & 1)
        return self.state[slot] == KEPT

    @property
    def settled(self) -> bool:
        """The file is open, and slots, index and slot table agree."""
        return self.fd >= 0 and self.agrees

    @property
    def is_busy(self) -> bool:
        """The descriptor is in use, or may be by a thread."""
        return bool(self._pins or self.writing_count or self.users)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The descriptor stays open; for those who wait between two uses of it."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def is_empty(self) -> bool:
        """No slot is used, being written, or read by a thread."""
        return self.free_count == self.slot_count and not self._pins

    def pin(self, slot: int) -> None:
        """Keep the slot from being reused until `SlabSet.unpin`."""
        self._pins[slot] = self._pins.get(slot, 0) + 1


def _find_all(states: bytearray, first: int, end: int, wanted: int = USED) -> Iterator[int]:
    slot = states.find(wanted, first, end)
    while slot >= 0:
        yield slot
        slot = states.find(wanted, slot + 1, end)


class Allocation(NamedTuple):
    slab: Slab
    slot: int


class SlabSet:
    """All slabs of one tier, and the sums over them."""

    def __init__(self, slab_bytes: int, max_slabs: int) -> None:
        self.slab_bytes = slab_bytes
        self.max_slabs = max_slabs
        self.by_id: dict[int, Slab] = {}
        self.used_charge_bytes = 0
        self.kept_charge_bytes = 0
        self.cached_blocks = 0
        self.cached_bytes = 0
        self._open: list[dict[int, Slab]] = [{} for _ in SLOT_CLASSES]
        self._of_class: list[dict[int, Slab]] = [{} for _ in SLOT_CLASSES]
        self.spare: dict[int, Slab] = {}
        """Slabs that any class may take."""
        self._next_id = 0
        self.on_freed: Callable[[Slab, int], None] = lambda slab, slot: None
        """Told of slots of shared slabs that are free from now on, before they are used again."""
        self.on_withdrawn: Callable[[Slab], None] = lambda slab: None
        """Told of shared slabs that lose all their blocks, before that happens."""

    def withdraw(self, slab: Slab) -> None:
        """Nobody else may read the slab's blocks from now on."""
        if slab.shared_as >= 0:
            self.on_withdrawn(slab)
            slab.shared_as = -1

    def withdraw_all(self) -> None:
        for slab in self.by_id.values():
            self.withdraw(slab)

    @property
    def capacity_bytes(self) -> int:
        return self.max_slabs * self.slab_bytes

    @property
    def disk_bytes(self) -> int:
        return len(self.by_id) * self.slab_bytes

    def take_id(self) -> int:
        """An id that no slab has had since the directory was opened, and none below `skip_ids`."""
        self._next_id += 1
        return self._next_id - 1

    def skip_ids(self, next_id: int) -> None:
        """Give out no id below that one."""
        self._next_id = max(self._next_id, next_id)

    def add(self, slab_id: int, row: SlabRow | None = None) -> Slab:
        """A slab that exists on disk; of no class and no use if the row is missing or wrong."""
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
        """The slab's file is gone, and with it whatever it held."""
        self.withdraw(slab)
        self._count(slab, -1)
        self._sort_out(slab)
        del self.by_id[slab.slab_id]

    def reformat(self, slab: Slab, class_index: int | None, tick: int) -> None:
        """Empty the slab and give it a class, or none."""
        self.withdraw(slab)
        self._count(slab, -1)
        self._sort_out(slab)
        layout = NO_LAYOUT if class_index is None else slab_layout(class_index, self.slab_bytes)
        slab.format(layout, tick)
        self._count(slab, 1)
        self._sort_in(slab)

    def spare_slab(self) -> Slab | None:
        """An empty slab for any class, if there is one that no thread reads."""
        return next((slab for slab in self.spare.values() if slab.is_empty()), None)

    def slabs_of(self, class_index: int) -> list[Slab]:
        """All slabs of the class; none if there is no such class."""
        return [
            slab for of in self._of_class[class_index : class_index + 1] for slab in of.values()
        ]

    def open_slab(self, class_index: int) -> Slab | None:
        """A slab of the class with a free slot."""
        return next(iter(self._open[class_index].values()), None)

    def open_slab_near(self, class_index: int) -> Slab | None:
        """A slab of the class, or of one a little above it, with a free slot."""
        for near in self._open[class_index : class_index + 1 + NEAR_CLASSES]:
            if near:
                return next(iter(near.values()))
        return None

    def allocate(self, slab: Slab) -> int:
        """A free slot of a slab that `open_slab` has just named; `commit` or `abort` follows."""
        slab.hydrate()
        slot = slab.state.find(FREE, slab._hint)
        if slot < 0:
            slot = slab.state.find(FREE)
        slab.state[slot] = WRITING
        slab.proof[slot] = 0
        slab._hint = slot + 1
        slab.free_count -= 1
        slab.writing_count += 1
        self.spare.pop(slab.slab_id, None)
        if slab.free_count == 0:
            self._sort_out(slab)
        return slot

    def commit(self, slab: Slab, slot: int, length: int, checksum: int) -> None:
        """The slot holds its block now, and the bytes are known to be right."""
        assert slab.state[slot] == WRITING
        slab.state[slot] = USED
        slab.proof[slot] = checksum
        slab.writing_count -= 1
        self._add_block(slab, length)

    def abort(self, slab: Slab, slot: int) -> None:
        """The block could not be written."""
        assert slab.state[slot] == WRITING
        slab.writing_count -= 1
        self._release(slab, slot)

    def adopt(self, slab: Slab, slot: int, length: int) -> bool:
        """Take in a block that a table says is there. False if the slot holds one already."""
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
        """The block is no longer wanted. Its slot can be given out again at once, or when the
        last pin is gone."""
        assert slab.state[slot] in (USED, KEPT)
        self.unkeep(slab, slot)
        if slab.shared_as >= 0:
            self.on_freed(slab, slot)
        slab.proof[slot] = 0
        if slab.used_count == 1:
            length = slab.used_bytes  # a damaged table may have lied about the others' lengths
        length = min(length, slab.used_bytes)
        slab.used_count -= 1
        slab.used_bytes -= length
        self.used_charge_bytes -= slab.charge_bytes
        self.cached_blocks -= 1
        self.cached_bytes -= length
        if slot in slab._pins:
            slab.state[slot] = ZOMBIE
        else:
            self._release(slab, slot)

    def keep(self, slab: Slab, slot: int) -> bool:
        """Mark the block of a used slot as one that is not to be evicted. False if it was."""
        slab.hydrate()
        if slab.state[slot] != USED:
            return False
        slab.state[slot] = KEPT
        slab.kept_count += 1
        self.kept_charge_bytes += slab.charge_bytes
        return True

    def unkeep(self, slab: Slab, slot: int) -> bool:
        """Take the mark away. False if there was none."""
        slab.hydrate()
        if slab.state[slot] != KEPT:
            return False
        slab.state[slot] = USED
        slab.kept_count -= 1
        self.kept_charge_bytes -= slab.charge_bytes
        return True

    def set_used_bytes(self, slab: Slab, used_bytes: int) -> None:
        """The slab's blocks were counted."""
        self.cached_bytes += used_bytes - slab.used_bytes
        slab.used_bytes = used_bytes

    def unpin(self, slab: Slab, slot: int) -> None:
        slab._pins[slot] -= 1
        if slab._pins[slot] == 0:
            del slab._pins[slot]
            if slab.state[slot] == ZOMBIE:
                self._release(slab, slot)

    def drain(self, slab: Slab) -> None:
        """Give out no more slots of this slab, until `reformat`, `remove` or `undrain`."""
        slab.draining = True
        self._sort_out(slab)

    def undrain(self, slab: Slab) -> None:
        slab.draining = False
        self._sort_in(slab)

    def free_charge_by_class(self) -> dict[int, int]:
        """Bytes of free slots in every class that has a slab."""
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
        self.kept_charge_bytes += sign * slab.kept_count * slab.charge_bytes
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
