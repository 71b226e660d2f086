"""The slot allocator's invariants under random operations, against a model."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachefs.cache_dir.slab import FREE, PINNED, USED, WRITING, ZOMBIE, Slab
from cachefs.cache_dir.slabs import SlabSet
from cachefs.format.index_record import decode_slab_row, encode_slab_row
from cachefs.format.slab import class_of

SLAB_BYTES = 4 << 20
CLASSES = [class_of(1 << 20), class_of(800_000), class_of(500_000)]


class SlotMachine(RuleBasedStateMachine):
    """`model` maps (slab id, slot) to [state, length, references]; what it doesn't name is free."""

    @initialize()
    def start(self) -> None:
        self.slabs = SlabSet(SLAB_BYTES, 6)
        self.model: dict[tuple[int, int], list[int]] = {}
        self.draining: set[int] = set()

    def pick(self, data: st.DataObject, *states: int, referenced: bool = False) -> tuple[Slab, int]:
        places = sorted(
            place
            for place, (state, _, references) in self.model.items()
            if state in states and (references or not referenced)
        )
        slab_id, slot = data.draw(st.sampled_from(places))
        return self.slabs.by_id[slab_id], slot

    def has(self, *states: int, referenced: bool = False) -> bool:
        return any(s in states and (p or not referenced) for s, _, p in self.model.values())

    def of_slab(self, slab: Slab) -> list[list[int]]:
        return [value for (slab_id, _), value in self.model.items() if slab_id == slab.slab_id]

    @precondition(lambda self: len(self.slabs.by_id) < 6)
    @rule(class_index=st.sampled_from(CLASSES))
    def grow(self, class_index: int) -> None:
        slab = self.slabs.add(self.slabs.take_id())
        assert slab.is_empty()
        self.slabs.reformat(slab, class_index, 0)

    @rule(class_index=st.sampled_from(CLASSES))
    def allocate(self, class_index: int) -> None:
        slab = self.slabs.open_slab(class_index)
        if slab is None:
            for other in self.slabs.by_id.values():
                if other.class_index == class_index and other.slab_id not in self.draining:
                    assert len(self.of_slab(other)) == other.slot_count
            return
        assert slab.slab_id not in self.draining
        slot = self.slabs.allocate(slab)
        assert (slab.slab_id, slot) not in self.model
        self.model[slab.slab_id, slot] = [WRITING, 0, 0]

    @precondition(lambda self: self.has(WRITING))
    @rule(data=st.data(), length=st.integers(1, 500_000), good=st.booleans())
    def finish_write(self, data: st.DataObject, length: int, good: bool) -> None:
        slab, slot = self.pick(data, WRITING)
        if good:
            self.slabs.commit(slab, slot, length, 99)
            assert slab.verified[slot] == 99
            self.model[slab.slab_id, slot] = [USED, length, 0]
        else:
            self.slabs.abort(slab, slot)
            del self.model[slab.slab_id, slot]

    @precondition(lambda self: self.has(USED, PINNED))
    @rule(data=st.data())
    def add_reference(self, data: st.DataObject) -> None:
        slab, slot = self.pick(data, USED, PINNED)
        slab.add_reference(slot)
        self.model[slab.slab_id, slot][2] += 1

    @precondition(lambda self: self.has(USED, PINNED, ZOMBIE, referenced=True))
    @rule(data=st.data())
    def drop_reference(self, data: st.DataObject) -> None:
        slab, slot = self.pick(data, USED, PINNED, ZOMBIE, referenced=True)
        self.slabs.drop_reference(slab, slot)
        value = self.model[slab.slab_id, slot]
        value[2] -= 1
        if value[0] == ZOMBIE and value[2] == 0:
            del self.model[slab.slab_id, slot]

    @precondition(lambda self: self.has(USED, PINNED))
    @rule(data=st.data(), pin=st.booleans())
    def pin_or_not(self, data: st.DataObject, pin: bool) -> None:
        slab, slot = self.pick(data, USED, PINNED)
        value = self.model[slab.slab_id, slot]
        change = self.slabs.pin if pin else self.slabs.unpin
        assert change(slab, slot) is (value[0] == (USED if pin else PINNED))
        value[0] = PINNED if pin else USED

    @precondition(lambda self: self.has(USED, PINNED))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slab, slot = self.pick(data, USED, PINNED)
        value = self.model[slab.slab_id, slot]
        self.slabs.free(slab, slot, value[1])
        assert slab.verified[slot] == 0
        if value[2]:
            value[0] = ZOMBIE
        else:
            del self.model[slab.slab_id, slot]

    @precondition(lambda self: self.slabs.by_id)
    @rule(data=st.data())
    def drain_or_reassign(self, data: st.DataObject) -> None:
        slab = self.slabs.by_id[data.draw(st.sampled_from(sorted(self.slabs.by_id)))]
        if slab.is_empty():
            assert self.of_slab(slab) == []
            self.draining.discard(slab.slab_id)
            if data.draw(st.booleans()):
                self.slabs.reformat(slab, data.draw(st.sampled_from(CLASSES)), 0)
            else:
                self.slabs.remove(slab)
        elif slab.slab_id in self.draining:
            self.slabs.undrain(slab)
            self.draining.discard(slab.slab_id)
        else:
            self.slabs.drain(slab)
            self.draining.add(slab.slab_id)

    @precondition(lambda self: self.slabs.by_id)
    @rule(data=st.data())
    def restart_one(self, data: st.DataObject) -> None:
        """A row restores what is used; only for slabs where nothing is under way."""
        slab = self.slabs.by_id[data.draw(st.sampled_from(sorted(self.slabs.by_id)))]
        if any(
            state not in (USED, PINNED) or references for state, _, references in self.of_slab(slab)
        ):
            return
        row = decode_slab_row(encode_slab_row(slab.row()))
        self.slabs.remove(slab)
        self.draining.discard(slab.slab_id)
        again = self.slabs.add(slab.slab_id, row)
        assert again.class_index == slab.class_index
        pinned = [slot for slot in range(again.slot_count) if slab.is_pinned(slot)]
        assert pinned == [slot for slot in range(again.slot_count) if again.is_pinned(slot)]
        for slot in range(again.slot_count):
            assert again.holds(slot) == ((slab.slab_id, slot) in self.model)

    @precondition(lambda self: self.slabs.by_id)
    @rule(data=st.data(), length=st.integers(1, 500_000))
    def adopt(self, data: st.DataObject, length: int) -> None:
        slab = self.slabs.by_id[data.draw(st.sampled_from(sorted(self.slabs.by_id)))]
        if slab.slot_count == 0:
            return
        slot = data.draw(st.integers(0, slab.slot_count - 1))
        taken = (slab.slab_id, slot) in self.model
        assert self.slabs.adopt(slab, slot, length) is not taken
        if not taken:
            assert slab.verified[slot] == 0
            self.model[slab.slab_id, slot] = [USED, length, 0]

    @invariant()
    def sums_agree(self) -> None:
        used = [v for v in self.model.values() if v[0] in (USED, PINNED)]
        assert self.slabs.cached_blocks == len(used)
        assert self.slabs.cached_bytes == sum(length for _, length, _ in used)
        charge = pinned_charge = 0
        for slab in self.slabs.by_id.values():
            values = self.of_slab(slab)
            assert slab.used_count == sum(state in (USED, PINNED) for state, _, _ in values)
            assert slab.pinned_count == sum(state == PINNED for state, _, _ in values)
            assert slab.evictable_count == len(list(slab.evictable_slots()))
            assert slab.used_count == len(list(slab.used_slots()))
            pinned_charge += slab.pinned_count * slab.charge_bytes
            assert slab.writing_count == sum(state == WRITING for state, _, _ in values)
            assert slab.free_count == slab.slot_count - len(values)
            charge += slab.used_count * slab.charge_bytes
        assert self.slabs.used_charge_bytes == charge <= self.slabs.disk_bytes
        assert self.slabs.pinned_charge_bytes == pinned_charge
        for (slab_id, slot), (state, _, _) in self.model.items():
            slab = self.slabs.by_id[slab_id]
            slab.hydrate()
            assert slab.state[slot] == state != FREE
            assert slab.is_evictable(slot) is (state == USED)
            assert slab.is_pinned(slot) is (state == PINNED)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_row_of_another_slab_size_is_not_believed() -> None:
    big = SlabSet(SLAB_BYTES * 2, 1)
    slab = big.add(0)
    big.reformat(slab, CLASSES[0], 0)
    other = SlabSet(SLAB_BYTES, 1)
    assert other.add(0, slab.row()).slot_count == 0
    assert other.open_slab(CLASSES[0]) is None


def test_memory_per_slot_is_small() -> None:
    slabs = SlabSet(64 << 20, 1)
    slab = slabs.add(0)
    slabs.reformat(slab, 0, 0)
    slab.hydrate()
    arrays = (slab.state, slab.ticks, slab.verified)
    assert sum(a.__sizeof__() for a in arrays) < 14 * slab.slot_count


def test_a_full_tier_is_charged_its_quota() -> None:
    for class_index in range(34):
        slabs = SlabSet(SLAB_BYTES, 1)
        slab = slabs.add(0)
        slabs.reformat(slab, class_index, 0)
        for _ in range(slab.slot_count):
            slabs.commit(slab, slabs.allocate(slab), 1, 1)
        assert 0.99 * SLAB_BYTES < slabs.used_charge_bytes <= SLAB_BYTES
