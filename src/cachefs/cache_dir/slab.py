"""One slab file: the states of its slots, and the references to them.

No I/O and no waiting: every method is atomic on the loop thread. The states of a slot are

    FREE -> WRITING -> USED -> FREE
                  \\-> FREE  \\-> ZOMBIE -> FREE     (freed while a worker thread reads it)
    FREE -> USED                                    (adopted: only the slot table had the block)
    USED <-> PINNED                                 (a user has pinned the block)

An evictable block has the state
USED: a search for these (`evictable_slots`) skips pinned ones at no cost. A reference prevents the
reuse of a slot while a thread reads it; it does not prevent eviction.

`SlabSet` (`slabs.py`) makes all changes of states; it keeps the sums over the slabs of a tier.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from cachefs.format.index_record import NO_CLASS, SlabRow, pack_bitmap, unpack_bitmap
from cachefs.format.slab import NO_MASK, SlabLayout, WholeObject

FREE, USED, WRITING, ZOMBIE, PINNED = 0, 1, 2, 3, 4
_PINNED_AS_USED = bytes(USED if state == PINNED else state for state in range(256))
_ONLY_PINNED = bytes(state == PINNED for state in range(256))

NO_LAYOUT = SlabLayout(NO_CLASS, 0, 0, 0)


class Slab:
    """One slab file; a `SlabSet` owns it. Uses 13 bytes of memory per slot once the slab is in use.

    `state[slot]` is the slot's state.
    `ticks[slot]` is the recency clock at the slot's last use; the eviction policy writes it.
    `verified[slot]` is the checksum that the slot's bytes had when they were verified since the
    daemon started; 0 if they were not verified. A reader may trust the bytes only if it expects the
    same checksum. So it is safe even if a damaged index has two keys that point to one slot.
    """

    __slots__ = (
        "_bitmap",
        "_pinned_bitmap",
        "_references",
        "charge_bytes",
        "class_index",
        "data_offset",
        "draining",
        "fd",
        "free_count",
        "free_hint",
        "is_reconciled",
        "layout",
        "load_ticks",
        "mask",
        "pinned_count",
        "relay_file",
        "reported",
        "slab_bytes",
        "slab_id",
        "slot_bytes",
        "slot_count",
        "state",
        "table_fd",
        "tick",
        "ticks",
        "used_bytes",
        "used_count",
        "users",
        "verified",
        "was_opened",
        "was_read",
        "whole",
        "writing_count",
    )

    def __init__(self, slab_id: int, slab_bytes: int) -> None:
        self.slab_id = slab_id
        self.slab_bytes = slab_bytes
        self.fd = -1
        """Descriptor of the file; -1 while it is not open. `open_slabs.close_slab` closes it."""
        self.table_fd = -1
        """Descriptor of the file with header and slot table: `fd`, unless the slab holds a whole
        object."""
        self.whole: WholeObject | None = None
        """The object whose blocks this slab holds, if it is a slab for one object. Then slot N
        belongs to block N for ever, the file is never used for anything else, and all of it is
        evicted together: the kernel may read it without this process, for as long as anybody has
        it open."""
        self.mask = NO_MASK
        """`SlabHeader.mask`, valid while the file is open."""
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
        self.free_hint = 0
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
        return SlabRow(*fields, bitmap, pinned, self.whole)

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

    @property
    def is_complete(self) -> bool:
        """Whether it holds a whole object, all of whose blocks were verified since the start."""
        if self.whole is None or self.used_count < self.slot_count or self._bitmap is not None:
            return False
        return 0 not in self.verified

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
