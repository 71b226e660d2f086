"""Makes room in one tier: watermarks, free space of the file system, and the mix of classes.

It works slab by slab (`sweeper.py`). Between two slabs the loop runs and the lock is free. So
readers never wait for it, and an admission waits until one slab is done at most.

A new block gets room in this order (`_make_room`): a slot of a near class, if its class has no slab
("borrow"); a spare or a new slab; a borrowed slot; a slot of its class, after an eviction; a slot
of a near class, after an eviction; the slab of another class; whatever can be borrowed. A class
that has borrowed a quarter of a slab is in debt: it borrows only at the end, and so gets a slab of
its own."""

import errno
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import trio

from cachefs.cache.policies.base import SAMPLE_BLOCKS
from cachefs.cache.tier.store import TierStore
from cachefs.cache.tier.upkeep.sweeper import Demote, Sweeper
from cachefs.cache_dir.directory import OpenedSlab
from cachefs.cache_dir.open_slabs import close_slab
from cachefs.cache_dir.slab import Slab
from cachefs.cache_dir.slabs import NEAR_CLASSES
from cachefs.format.index_record import NO_CLASS
from cachefs.format.slab import SLOT_CLASSES, WholeObject
from cachefs.units import format_bytes

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Interval of the checks of free space, and time until a failed growth is tried again."""
_REFUSAL_S = 0.05
"""How long no room is made for a class after a failure: a search takes about a millisecond."""
_OLDEST = 0.05
"""Share of the oldest evictable blocks that is evicted before another class gives up a slab."""
_DEBT_PARTS = 4
"""A class may get a slab of its own when it has borrowed 1/4 of a slab since its last one."""
_PLAN_S = 0.2
"""How long a plan made for an admission is valid."""
_HASTY_SAMPLE_BLOCKS = 128
_CANDIDATES = 16
"""Number of slabs drawn at random; the one of least worth to the policy is given up."""
_PINNED_SHARE = 0.25
"""A slab with a larger share of pinned slots is not given to another class."""
_ROOM_SLOTS = 16
"""Maximum number of free slots that one call of `make_room` tries to get."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Evictor:
    """The evictor of one tier; its `ActiveTier` owns it.

    The admission calls `make_room`; `run` does everything that is not urgent.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._sweeper = Sweeper(store)
        self._slabs = store.slabs
        self._policy = store.policy
        # Held while one slab is chosen and evicted from: two tasks could choose the same one.
        self._lock = trio.Lock()
        self._parked = trio.lowlevel.ParkingLot()
        self._cursor = 0
        self._no_growth_before = 0.0
        self._broken_before = 0.0
        self._failing = False
        self._told_full = False
        self._pinned_reported = False
        self._debt_bytes = [0] * len(SLOT_CLASSES)
        """Per class: bytes of slots that it has borrowed since it last got a slab."""
        self._planned: float | None = None
        self._planned_until = 0.0
        self._held: set[Slab] = set()
        self._held_until = 0.0
        self._refused_until = [0.0] * len(SLOT_CLASSES)
        self.oldest_age = 0
        """Approximate age of the oldest blocks, about a second old. Updated only if there is a
        slower tier."""

    @property
    def demote(self) -> Demote | None:
        """Moves blocks to slower tiers; None if there is no slower tier."""
        return self._sweeper.demote

    @demote.setter
    def demote(self, demote: Demote | None) -> None:
        self._sweeper.demote = demote

    def wake(self) -> None:
        """Make `run` check the watermarks and the quota now."""
        self._parked.unpark_all()

    async def run(self) -> None:
        """Run forever: keep the tier within quota, free space and watermarks."""
        while True:
            with trio.move_on_after(CHECK_INTERVAL_S):
                if not self.above_high():
                    await self._parked.park()
            if not self._store.io.health.usable:
                await trio.sleep(CHECK_INTERVAL_S)
                continue
            await self._shrink_while_needed()
            if self.demote is not None:
                self.oldest_age = self._policy.oldest_age(list(self._slabs.by_id.values()))
            if self.above_high() and not await self._evict_to_low():
                await trio.sleep(CHECK_INTERVAL_S)  # nothing can be evicted; don't spin

    def has_or_makes_room(self, class_index: int) -> bool:
        """Whether `make_room` would probably succeed. Very cheap."""
        if self.has_room(class_index):
            return True
        now_s = time.monotonic()
        not_before_s = max(self._broken_before, self._refused_until[class_index])
        return self._policy.replaces and now_s >= not_before_s

    def has_room(self, class_index: int) -> bool:
        """Whether `make_room` would probably succeed without eviction. Very cheap."""
        slabs = self._slabs
        if slabs.open_slab_near(class_index) is not None or slabs.spare:
            return True
        not_before_s = max(self._broken_before, self._no_growth_before)
        return slabs.has_space(slabs.slab_bytes) and time.monotonic() >= not_before_s

    async def make_room(self, class_index: int, may_evict: bool = True) -> Slab | None:
        """Return a slab with a free slot for a block of the class; None if that is impossible, or
        if it needs an eviction and the policy or the caller (`may_evict`) allows none.

        If the class has no slab yet, or if no slab can be added, the slab may be of a slightly
        larger class. Otherwise, with many sizes and few slabs, each class would keep half a slab
        free.
        """
        async with self._lock:
            slab = self._slabs.open_slab(class_index)
            return slab or await self._make_room(class_index, may_evict)

    def refuse(self, class_index: int) -> None:
        """Record that no room was found for the class: don't try again for `_REFUSAL_S`."""
        self._refused_until[class_index] = time.monotonic() + _REFUSAL_S

    async def _make_room(self, class_index: int, may_evict: bool) -> Slab | None:
        slabs = self._slabs
        in_debt = self._debt_bytes[class_index] >= slabs.slab_bytes // _DEBT_PARTS
        if not in_debt and not slabs.slabs_of(class_index) and (near := self._borrow(class_index)):
            return near
        if await self._take_spare(class_index) or await self._grow(class_index):
            self._debt_bytes[class_index] = 0
            return slabs.open_slab(class_index)
        if not in_debt and (near := self._borrow(class_index)):
            return near
        may_evict = may_evict and self._policy.replaces
        # Don't evict blocks for a block that could not be written either.
        if not may_evict or time.monotonic() < self._broken_before:
            return self._borrow(class_index)
        await self._evict_for(class_index, class_index)
        if own := slabs.open_slab(class_index):
            return own
        if not in_debt:
            await self._evict_for(class_index, class_index + NEAR_CLASSES)
            if near := self._borrow(class_index):
                return near
        donor = self._donor(class_index)
        if donor and await self._give_up(donor, class_index):
            self._debt_bytes[class_index] = 0
            return slabs.open_slab(class_index)
        return self._borrow(class_index)

    async def _give_up(self, donor: Slab, class_index: int) -> bool:
        """Empty a slab, and use its space for a slab of the class. Returns whether it did."""
        if not await self._sweeper.empty(donor):
            return False
        if donor.whole is None:
            return await self._reassign(donor, class_index)
        return await self._delete(donor) and await self._grow(class_index)

    async def make_whole(self, whole: WholeObject, may_evict: bool) -> Slab | None:
        """Return the slab for one object, and create it if there is none; None if there is no space
        for it.

        For a new one, slabs without any block are deleted, and with `may_evict` those of other
        objects, the one of least worth first, as far as the policy allows.
        """
        while True:
            async with self._lock:
                slab = self._slabs.of_object.get(whole.object_id)
                if slab is not None:
                    if not await self._store.reconcile(slab):
                        return None
                    if slab.is_ready:
                        return slab
                    continue  # its files were damaged, and it is gone
                if time.monotonic() < max(self._broken_before, self._no_growth_before):
                    return None
                if whole.size_bytes > self._store.directory.watermarks.low_bytes:
                    return None
                if self._slabs.has_space(whole.size_bytes):
                    return await self._create_whole(whole)
                others = [slab for slab in self._slabs.of_object.values() if may_evict]
                others = [slab for slab in others if self._may_give_up(slab)]
                free_bytes = sum(slab.slab_bytes for slab in (*others, *self._slabs.spare.values()))
                if not self._slabs.has_space(whole.size_bytes - free_bytes):
                    return None
                if not await self._free_slab(others):
                    return None

    async def _free_slab(self, others: list[Slab]) -> bool:
        """Delete a slab without blocks, or one of `others`. Returns whether it did."""
        spare = self._slabs.spare_slab()
        if spare is not None:
            return await self._store.reconcile(spare) and await self._delete(spare)
        other = self._least_worth(others)
        if other is None or not self._policy.may_empty(other):
            return False
        return await self._sweeper.empty(other) and await self._delete(other)

    def _may_give_up(self, slab: Slab) -> bool:
        """Whether the slab of an object may be deleted: nothing is written to it, no block is
        pinned, and no process has the file open or mapped through the kernel."""
        is_busy = slab.writing_count > 0 or slab.pinned_count > 0
        return not is_busy and not self._sweeper.is_held(slab)

    async def _create_whole(self, whole: WholeObject) -> Slab | None:
        slab_id = self._store.files.take_id()
        create = partial(self._store.directory.create_object_slab, slab_id, whole)
        created = await self._try_to_create(whole.size_bytes, create)
        if created is None:
            return None
        slab = self._add(slab_id, created)
        self._slabs.make_whole(slab, whole, self._policy.now)
        slab.hydrate()
        return slab

    def _borrow(self, class_index: int) -> Slab | None:
        slab = self._slabs.open_slab_near(class_index)
        if slab is not None:
            self._debt_bytes[class_index] += slab.slot_bytes
        return slab

    async def _take_spare(self, class_index: int) -> bool:
        spare = self._slabs.spare_slab()
        return spare is not None and await self._reassign(spare, class_index)

    # -- watermarks ----------------------------------------------------------------------------

    def above_high(self) -> bool:
        return self._slabs.used_charge_bytes > self._store.directory.watermarks.high_bytes

    def _at_low(self) -> bool:
        return self._slabs.used_charge_bytes <= self._store.directory.watermarks.low_bytes

    def _plan(self, least: float = 0.0) -> float | None:
        """Return the policy's plan that evicts blocks down to the low watermark; None if no block
        can be evicted.

        The plan covers at least one block and at least the share `least`, even below the watermark.
        The share refers to evictable blocks; pinned blocks are not evicted, and neither are those
        of an object whose file is open.
        """
        used = self._slabs.used_charge_bytes
        evictable = used - self._slabs.pinned_charge_bytes
        slabs = list(self._slabs.by_id.values())
        if self._slabs.of_object:
            held = self._held_slabs()
            evictable -= sum(slab.evictable_count * slab.charge_bytes for slab in held)
            slabs = [slab for slab in slabs if slab not in held]
        if evictable <= 0:
            return None
        surplus = (used - self._store.directory.watermarks.low_bytes) / evictable
        fraction = min(1.0, max(least, surplus))
        return self._policy.plan(slabs, fraction, _HASTY_SAMPLE_BLOCKS if least else SAMPLE_BLOCKS)

    def _held_slabs(self) -> set[Slab]:
        """Return the slabs of objects whose files are open elsewhere, or were a second ago."""
        if time.monotonic() >= self._held_until:
            self._held_until = time.monotonic() + CHECK_INTERVAL_S
            objects = self._slabs.of_object.values()
            self._held = {slab for slab in objects if self._sweeper.is_held(slab)}
        return self._held

    async def _evict_to_low(self) -> bool:
        """Evict in rounds, with one plan each, until the low watermark is reached or a round evicts
        nothing. Returns False if no round evicted anything and the watermark is not reached."""
        evicted_any = False
        while not self._at_low():
            plan = self._plan()
            if plan is None:
                return evicted_any
            before = self._slabs.used_charge_bytes
            for slab in self._in_turn(list(self._slabs.by_id.values())):
                async with self._lock:
                    await self._sweeper.evict_from(slab, plan, self._at_low)
                if self._at_low():
                    return True
                await self._store.commit_early()
            if self._slabs.used_charge_bytes >= before:
                return evicted_any
            evicted_any = True
        return True

    async def _evict_for(self, first_class: int, last_class: int) -> None:
        """Evict some of the oldest blocks until these classes have a few free slots."""
        near = [
            slab
            for class_index in range(first_class, last_class + 1)
            for slab in self._in_turn(self._slabs.slabs_of(class_index))
        ]
        if not near:
            return
        wanted = min(_ROOM_SLOTS, sum(slab.slot_count for slab in near) // 8 + 1)

        def enough() -> bool:
            return sum(slab.free_count for slab in near) >= wanted

        # Planning takes about 200 us of the loop, so a recent plan is tried first.
        if time.monotonic() < self._planned_until:
            await self._evict_by(self._planned, near, enough)
        if not any(slab.free_count for slab in near):
            self._planned = self._plan(_OLDEST)
            self._planned_until = time.monotonic() + _PLAN_S
            await self._evict_by(self._planned, near, enough)

    async def _evict_by(
        self, plan: float | None, slabs: Sequence[Slab], enough: Callable[[], bool]
    ) -> None:
        if plan is None:
            return
        for slab in slabs:
            if not enough():
                await self._sweeper.evict_from(slab, plan, enough)

    def _in_turn(self, slabs: list[Slab]) -> list[Slab]:
        """Rotate the slabs, so that each call begins with another one."""
        start = self._cursor % len(slabs) if slabs else 0
        self._cursor = start + 1
        return slabs[start:] + slabs[:start]

    # -- whole slabs ---------------------------------------------------------------------------

    async def _grow(self, class_index: int) -> bool:
        """Create a slab of the class if quota and free space allow. Returns whether it did."""
        slabs = self._slabs
        slab_bytes = slabs.slab_bytes
        if not slabs.has_space(slab_bytes) or time.monotonic() < self._no_growth_before:
            return False
        slab_id = self._store.files.take_id()
        create = partial(self._store.directory.create_slab, slab_id, class_index)
        created = await self._try_to_create(slab_bytes, create)
        if created is None:
            return False
        self._slabs.reformat(self._add(slab_id, created), class_index, self._policy.now)
        return True

    async def _try_to_create(
        self, size_bytes: int, create: Callable[[], OpenedSlab]
    ) -> OpenedSlab | None:
        """Create a slab's files in the writer thread; None if the disk is full, or would be."""
        directory = self._store.directory
        try:
            created = await self._store.io.write(
                size_bytes, self._create_if_free, size_bytes, create
            )
        except OSError as error:
            self._no_growth_before = time.monotonic() + CHECK_INTERVAL_S
            self._failed(error, f"{directory.paths.root}: can't grow", error.errno not in _FULL)
            return None
        if created is None:
            self._no_growth_before = time.monotonic() + CHECK_INTERVAL_S
            if not self._told_full:
                log.info(
                    "%s: the cache stops growing at %s: more would leave less than "
                    "--free-space-ratio of the disk free",
                    directory.paths.root,
                    format_bytes(self._slabs.disk_bytes),
                )
            self._told_full = True
            return None
        self._told_full = False
        self._failing = False
        return created

    def _add(self, slab_id: int, created: OpenedSlab) -> Slab:
        """Add a slab that was just created. The caller must give it its class before its next
        await."""
        slab = self._slabs.add(slab_id)
        slab.fd, slab.table_fd, slab.mask = created.fd, created.table_fd, created.mask
        slab.was_opened = slab.is_reconciled = True
        self._store.put_row(slab)
        self._store.files.open_slabs.note(slab)
        return slab

    def _failed(self, error: OSError, what: str, broken: bool) -> None:
        """Count an error, and log it once until a slab has been created.

        If the disk is `broken`, rather than full, no room is made for `CHECK_INTERVAL_S`.
        """
        self._store.counters.write_errors += 1
        if broken:
            self._broken_before = time.monotonic() + CHECK_INTERVAL_S
        if not self._failing:
            log.warning("%s: %s", what, error.strerror)
        self._failing = True

    def _create_if_free(
        self, size_bytes: int, create: Callable[[], OpenedSlab]
    ) -> OpenedSlab | None:
        """In the writer thread: create a slab's files; None if too little space would be left."""
        return create() if self._store.directory.has_free_space(size_bytes) else None

    def _donor(self, class_index: int) -> Slab | None:
        """Return a slab of another class that is worth little, if the policy may empty it."""
        candidates = [
            slab
            for slab in self._slabs.by_id.values()
            if slab.class_index not in (class_index, NO_CLASS)
            and slab.writing_count == 0
            and slab.pinned_count <= slab.slot_count * _PINNED_SHARE
            and (slab.whole is None or self._may_give_up(slab))
        ]
        donor = self._least_worth(candidates)
        return donor if donor is not None and self._policy.may_empty(donor) else None

    def _least_worth(self, slabs: list[Slab]) -> Slab | None:
        drawn = random.sample(slabs, min(len(slabs), _CANDIDATES))
        return min(drawn, key=self._policy.worth, default=None)

    async def _reassign(self, slab: Slab, class_index: int) -> bool:
        """Give an empty slab another class. Returns whether it did."""
        store = self._store
        if not await store.reconcile(slab) or slab.fd < 0 or not slab.is_empty():
            return False
        if slab.whole is not None:  # so its table says; it had no row
            return False
        self._slabs.drain(slab)
        try:
            with slab.in_use():
                header = await store.io.write(
                    0, store.directory.format_slab, slab.fd, slab.slab_id, class_index
                )
        except OSError as error:
            what = f"{store.directory.paths.slab(slab.slab_id)}: can't be rewritten"
            self._failed(error, what, broken=True)
            self._slabs.reformat(slab, None, self._policy.now)
            store.put_row(slab)
            return False
        self._slabs.reformat(slab, class_index, self._policy.now)
        slab.mask = header.mask
        store.put_row(slab)
        store.counters.reassigned += 1
        return True

    async def _shrink_while_needed(self) -> None:
        """Delete slabs of objects without blocks, and others while there are more than the quota
        allows or the disk is too full."""
        for slab in list(self._slabs.emptied.values()):
            async with self._lock:
                if slab.used_count or slab.writing_count:
                    self._slabs.emptied.pop(slab.slab_id, None)
                else:
                    await self._delete(slab)  # if it is still being read, the next time
        while self._slabs.by_id and await self._should_shrink():
            async with self._lock:
                if not await self._delete_one():
                    self._report_pinned()
                    return

    def _report_pinned(self) -> None:
        """Log once if pinned blocks in all slabs prevent the tier from shrinking."""
        pinned = sum(slab.pinned_count > 0 for slab in self._slabs.by_id.values())
        if pinned and pinned == len(self._slabs.by_id) and not self._pinned_reported:
            self._pinned_reported = True
            log.warning(
                "%s uses more than its quota and can't free space, because all of its slabs have "
                "pinned blocks; unpin some",
                self._store.directory.paths.root,
            )

    async def _should_shrink(self) -> bool:
        if not self._slabs.has_space(0):
            return True
        try:
            return not await self._store.io.write(0, self._store.directory.has_free_space)
        except OSError:
            return False

    async def _delete_one(self) -> bool:
        slabs = self._slabs
        unpinned = [slab for slab in slabs.by_id.values() if not slab.pinned_count]
        free = [slab for slab in unpinned if slab.whole is None or self._may_give_up(slab)]
        slab = self._least_worth(free or unpinned)
        if slab is None:
            slab = min(slabs.by_id.values(), key=lambda slab: slab.pinned_count, default=None)
        if slab is None:
            return False
        if not slab.is_empty() and (
            not self._policy.replaces or not await self._sweeper.empty(slab, must=True)
        ):
            return False
        return await self._delete(slab)

    async def _delete(self, slab: Slab) -> bool:
        """Delete the file of a slab without blocks. Returns whether it did."""
        store, slabs = self._store, self._slabs
        if slabs.by_id.get(slab.slab_id) is not slab or not slab.is_empty():
            return False
        slabs.drain(slab)
        try:
            await store.io.write(0, store.directory.delete_slab, slab.slab_id)
        except OSError as error:
            self._failed(
                error, f"{store.directory.paths.slab(slab.slab_id)}: can't be deleted", broken=True
            )
            slabs.undrain(slab)
            return False
        # The slab counts until its file is deleted: the sums never report used space as free.
        if slabs.by_id.get(slab.slab_id) is slab:
            slabs.remove(slab)
            store.index.delete_slab(slab.slab_id)
        if not slab.is_busy:  # otherwise `OpenSlabs` closes it later
            close_slab(slab)
        return True
