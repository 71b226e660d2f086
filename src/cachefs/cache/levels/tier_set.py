"""The tiers of a mount, fastest first, and which block belongs where (`placement.py`).

Tiers can be added and removed while the mount serves reads. Every method that is not a coroutine
is atomic on the event loop. After an await the set may have changed.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import trio

from cachefs.cache.levels.active_tier import ActiveTier
from cachefs.cache.levels.placement import Placement
from cachefs.cache.tier.admission import Admission
from cachefs.cache.tier.common import Common
from cachefs.cache.tier.store import OnAdmitted, TierStore
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.errors import CacheDirError
from cachefs.types import BlockKey, BlockLocation, Medium

log = logging.getLogger(__name__)

_SPEED = {medium: rank for rank, medium in enumerate(Medium)}


class TierSet:
    """The tiers of one mount; its `BlockCache` owns the object. Each tier sees it as its
    `Neighbours`."""

    def __init__(self, tiers: Sequence[CacheDirectory], common: Common) -> None:
        """Open the indexes of the tiers. If this raises `CacheDirError`, the caller still owns the
        tiers and must close them."""
        self.common = common
        self._tiers: list[ActiveTier] = []
        try:
            for tier in tiers:
                try:
                    self._tiers.append(self._activate(tier))
                except CacheDirError as error:
                    if not common.options.tolerant:
                        raise
                    log.error("%s; the mount goes on without this tier", error)
        except BaseException:
            for active in self._tiers:
                active.store.index.abandon()
            raise
        self._placement = Placement([])
        self._on_admitted: OnAdmitted | None = None
        self.only_store: TierStore | None = None
        """The store of the only tier; None if there is not exactly one tier."""
        self._arrange()

    def __len__(self) -> int:
        return len(self._tiers)

    def __iter__(self) -> Iterator[ActiveTier]:
        return iter(self._tiers)

    def __getitem__(self, number: int) -> ActiveTier:
        return self._tiers[number]

    def all(self) -> list[ActiveTier]:
        """Return a copy of the present list, for loops that await."""
        return list(self._tiers)

    def take_all(self) -> list[ActiveTier]:
        """Remove all tiers from the set and return them."""
        tiers, self._tiers = self._tiers, []
        self._arrange()
        return tiers

    def _activate(self, tier: CacheDirectory) -> ActiveTier:
        return ActiveTier(tier, self.common, self)

    def _arrange(self) -> None:
        """Compute levels and placement again after a tier was added, removed or changed."""
        self._tiers.sort(key=lambda active: _SPEED[active.directory.medium])
        media = list(dict.fromkeys(active.directory.medium for active in self._tiers))
        for active in self._tiers:
            active.connect(media.index(active.directory.medium), len(media))
            active.store.on_admitted = self._on_admitted
        self._placement = Placement([active.place for active in self._tiers])
        self.only_store = self._tiers[0].store if len(self._tiers) == 1 else None

    def tell_admitted(self, on_admitted: OnAdmitted) -> None:
        """Call `on_admitted` from now on whenever any tier stores a block."""
        self._on_admitted = on_admitted
        self._arrange()

    # -- blocks --------------------------------------------------------------------------------

    def find_verified(self, key: BlockKey) -> tuple[TierStore, BlockLocation] | None:
        """Return the store and location of the first tier whose `TierStore.find_verified` finds
        it."""
        for active in self._tiers:
            location = active.store.find_verified(key)
            if location is not None:
                return active.store, location
        return None

    def read_slot_now(
        self, key: BlockKey, offset: int, length: int, buffer: memoryview
    ) -> memoryview | None:
        """Return the result of the first tier whose `TierStore.read_slot_now` succeeds, else
        None."""
        for number in self._placement.order(key):
            found = self._tiers[number].store.read_slot_now(key, offset, length, buffer)
            if found is not None:
                return found
        return None

    @property
    def are_cold(self) -> bool:
        """Whether a look-up may need `bring` first, because some index is cold."""
        return any(active.store.index.is_cold for active in self._tiers)

    async def bring(self, key: BlockKey) -> None:
        """Load the block's row into memory, in each tier whose index is cold. Call it before the
        look-up."""
        for active in self.all():
            if active.store.index.is_cold:
                await active.store.index.bring(key)

    def holder(self, key: BlockKey, asked: list[ActiveTier]) -> ActiveTier | None:
        """Return a tier that has the block and is not in `asked`, or None. Call it again before
        each attempt: the block may have moved to another tier during the last one."""
        for number in self._placement.order(key):
            active = self._tiers[number]
            if active.store.index.find(key) is not None and active not in asked:
                return active
        return None

    def cached_bytes(self) -> int:
        """Return the bytes of blocks in all tiers."""
        return sum(active.directory.slabs.cached_bytes for active in self._tiers)

    def have(self, key: BlockKey) -> bool:
        """Return whether a usable tier has the block."""
        for active in self._tiers:  # not `any`: its generator costs as much as the look-up
            if active.usable and active.store.index.find(key) is not None:
                return True
        return False

    def entry(self, key: BlockKey, length: int, first_level: int) -> ActiveTier | None:
        """Return the tier that should store a block of `length` bytes, on `first_level` or a
        slower level; None if no tier takes it. The blocks of an object that has a slab of its own
        belong there."""
        tiers = self._tiers
        for active in tiers:
            if active.level < first_level or not active.usable:
                continue
            if key.object_id in active.directory.slabs.of_object:
                return active if active.admission.is_open else None
        if len(tiers) == 1:
            (only,) = tiers
            takes = first_level == 0 and only.usable and only.admission.takes(length)
            return only if takes else None
        usable = [active.usable for active in tiers].__getitem__
        number = self._placement.entry(
            key, usable, lambda number: tiers[number].takes(key, length), first_level
        )
        # To store a block unpinned is better than not to store it.
        if number is None and self.common.admission_filter.must_be_pinned(key):
            number = self._placement.entry(
                key, usable, lambda number: tiers[number].admission.takes(length), first_level
            )
        return None if number is None else tiers[number]

    def below(self, tier: ActiveTier, key: BlockKey, length: int) -> Admission | None:
        """Return where the tier may demote a block to (see `Neighbours.below`)."""
        target = self.entry(key, length, tier.level + 1)
        return None if target is None else target.admission

    def above(self, tier: ActiveTier, key: BlockKey) -> ActiveTier | None:
        """Return the block's home in the next faster level (see `Neighbours.above`)."""
        tiers = self._tiers
        if tier.level == 0 or tier not in tiers:  # fastest level, or just removed
            return None
        number = self._placement.home(key, tier.level - 1, lambda number: tiers[number].usable)
        return None if number is None else tiers[number]

    # -- coming and going ----------------------------------------------------------------------

    async def add(self, tier: CacheDirectory, nursery: trio.Nursery) -> None:
        """Start using the tier. If this raises `CacheDirError`, the caller still owns the tier."""
        active = self._activate(tier)
        await nursery.start(active.run)
        self._tiers.append(active)
        self._arrange()

    async def remove(self, path: Path) -> None:
        """Stop using the tier and close it. Raises `CacheDirError` if there is no such tier."""
        active = self._find(path)
        # From here on no task finds the tier. Tasks that found it earlier end when its threads do.
        self._tiers.remove(active)
        self._arrange()
        active.retire()
        await active.close()

    def resize(self, path: Path, quota_bytes: int) -> None:
        """Set the quota of a tier. Raises `CacheDirError` if there is no such tier, or if the
        pinned blocks would not fit into the new quota."""
        active = self._find(path)
        active.refuse_to_lose_pinned(quota_bytes)
        active.directory.resize(quota_bytes)
        self._arrange()
        active.evictor.wake()

    def _find(self, path: Path) -> ActiveTier:
        for active in self._tiers:
            if active.directory.paths.root == path:
                return active
        raise CacheDirError(f"{path} is no cache directory of this mount")
