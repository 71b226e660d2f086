"""The slots of one tier: which are free, which hold a block, and which can't be reused yet.

No I/O and no waiting: every method is atomic on the loop thread. `slab.py` describes the states of
a slot.

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

A slab of a whole object (`Slab.whole`) has no class of `SLOT_CLASSES`, and is never among the open
or spare slabs: each of its slots is for one block only (`allocate_for`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cachefs.cache_dir.slab import FREE, NO_LAYOUT, PINNED, USED, WRITING, ZOMBIE, Slab
from cachefs.format.index_record import NO_CLASS, SlabRow
from cachefs.format.slab import OBJECT_CLASS, SLOT_CLASSES, WholeObject, slab_layout
from cachefs.types import BlockKey

NEAR_CLASSES = 5
"""How many larger classes a block may use. From 4 KiB on, classes grow by an eighth at most, so
such a slot is at most 80 % larger than one of the block's own class."""


class SlabSet:
    """All slabs of one tier, and the sums over them. The `CacheDirectory` owns it."""

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
        self.of_object: dict[bytes, Slab] = {}
        """Object id -> slab, of the slabs that hold a whole object."""
        self.emptied: dict[int, Slab] = {}
        """Slab id -> slab, of those whose last block was dropped: their files are to be deleted,
        unless they have got a block again."""
        self.disk_bytes = 0
        """Size of all slab files, without the tables of whole objects."""
        self.spare: dict[int, Slab] = {}
        """Slab id -> slab, of the slabs that any class may take."""
        self._next_id = 0
        self.on_freed: Callable[[Slab, int], None] = lambda slab, slot: None
        """Called when a slot of a published slab is freed, before the slot is used again. Only the
        `Publisher` sets it."""
        self.on_withdrawn: Callable[[Slab], None] = lambda slab: None
        """Called before a published slab loses all its blocks or is withdrawn. Only the `Publisher`
        sets it."""

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

    def has_space(self, slab_bytes: int) -> bool:
        """Whether the quota allows another slab file of this size."""
        return self.disk_bytes + slab_bytes <= self.capacity_bytes

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
        if row is not None and row.whole is not None:
            self._become(slab, row.whole)
            slab.restore(row, row.whole.layout)
        elif row is not None and row.class_index < len(SLOT_CLASSES):
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
        self.emptied.pop(slab.slab_id, None)
        del self.by_id[slab.slab_id]

    def reformat(self, slab: Slab, class_index: int | None, tick: int) -> None:
        """Reset the slab to an empty one of the given class, or without a class if None."""
        self.withdraw(slab)
        self._count(slab, -1)
        self._sort_out(slab)
        assert slab.whole is None
        layout = NO_LAYOUT if class_index is None else slab_layout(class_index, self.slab_bytes)
        slab.format(layout, tick)
        self._count(slab, 1)
        self._sort_in(slab)

    def make_whole(self, slab: Slab, whole: WholeObject, tick: int) -> None:
        """Make a slab without a class one that holds a whole object, and has no block yet."""
        assert slab.class_index == NO_CLASS
        self._count(slab, -1)
        self._sort_out(slab)
        self._become(slab, whole)
        slab.format(whole.layout, tick)
        self._count(slab, 1)

    @staticmethod
    def _become(slab: Slab, whole: WholeObject) -> None:
        slab.whole, slab.slab_bytes = whole, whole.size_bytes

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
        slot = slab.state.find(FREE, slab.free_hint)
        if slot < 0:
            slot = slab.state.find(FREE)
        slab.state[slot] = WRITING
        slab.verified[slot] = 0
        slab.free_hint = slot + 1
        slab.free_count -= 1
        slab.writing_count += 1
        self.spare.pop(slab.slab_id, None)
        if slab.free_count == 0:
            self._sort_out(slab)
        return slot

    def allocate_for(self, slab: Slab, key: BlockKey) -> bool:
        """Put the slot of this block into the state WRITING, in the slab of its object. `commit` or
        `abort` must follow. Returns False if the slot is not free."""
        assert slab.whole is not None
        assert slab.whole.object_id == key.object_id
        slab.hydrate()
        slot = key.block_index
        if slab.draining or slot >= slab.slot_count or slab.state[slot] != FREE:
            return False
        slab.state[slot] = WRITING
        slab.verified[slot] = 0
        slab.free_count -= 1
        slab.writing_count += 1
        return True

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
        if slab.whole is not None and slab.used_count == 0:
            self.emptied[slab.slab_id] = slab

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

    @contextmanager
    def references(self, places: Iterable[tuple[Slab, int]]) -> Iterator[None]:
        """Hold a reference to each of these slots while the context is open."""
        held = []
        try:
            for slab, slot in places:
                slab.add_reference(slot)
                held.append((slab, slot))
            yield
        finally:
            for slab, slot in held:
                self.drop_reference(slab, slot)

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
        self.disk_bytes += sign * slab.slab_bytes
        if slab.whole is not None:
            if sign > 0:
                self.of_object[slab.whole.object_id] = slab
            elif self.of_object.get(slab.whole.object_id) is slab:
                del self.of_object[slab.whole.object_id]
        elif slab.class_index != NO_CLASS:
            if sign > 0:
                self._of_class[slab.class_index][slab.slab_id] = slab
            else:
                del self._of_class[slab.class_index][slab.slab_id]

    def _sort_in(self, slab: Slab) -> None:
        if slab.draining or slab.whole is not None:
            return
        if slab.free_count == slab.slot_count:
            self.spare[slab.slab_id] = slab
        if slab.free_count and slab.class_index != NO_CLASS:
            self._open[slab.class_index][slab.slab_id] = slab

    def _sort_out(self, slab: Slab) -> None:
        self.spare.pop(slab.slab_id, None)
        if slab.class_index not in (NO_CLASS, OBJECT_CLASS):
            self._open[slab.class_index].pop(slab.slab_id, None)
