"""Whole object versions in the tiers: locate, pin, unpin and drop (`evict`).

Each operation works on a batch of object versions and lets the event loop run every `_STEP_BLOCKS`
blocks. Within a step, no await comes between the look-up of a block and its change.

A dropped version does not come back by itself. Its blocks may be on their way into a tier, from
the origin or from another tier, in the step that drops it. The tier refuses them on arrival
(`tier/admission_filter.py`). A later read fetches the version again and may store it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.cache.levels.active_tier import ActiveTier
from cachefs.cache.tier.admission_filter import AdmissionFilter
from cachefs.cache.tier.index import Index
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.slab import Slab
from cachefs.errors import WorkersStoppedError
from cachefs.format.slab import entry_at
from cachefs.types import BlockKey, BlockLocation, Medium, ObjectRef

_STEP_BLOCKS = 128
"""Blocks to process in one turn of the event loop. Each takes about 5 us."""
_FEW_BLOCKS = 16
"""Up to this many blocks are looked up one by one; more are found by a scan of the index."""
_PASSES = 3
"""Most passes over all tiers. A block that moves between tiers may escape the first pass."""

CachedBlock = tuple[BlockKey, BlockLocation]
"""A block and its location in a tier."""
Act = Callable[[TierStore, BlockKey, Slab, BlockLocation], None]


@dataclass(slots=True)
class TierShare:
    """What one tier holds of some object versions."""

    path: Path
    medium: Medium
    blocks: int = 0
    size_bytes: int = 0
    pinned_bytes: int = 0
    """The pinned part of `size_bytes`."""


@dataclass(slots=True)
class CachedShare:
    """What is cached of an object version, by tier and in total. A block that is moving is in two
    tiers; the totals count it once."""

    tiers: list[TierShare]
    blocks: int = 0
    size_bytes: int = 0
    pinned_bytes: int = 0


@dataclass(slots=True)
class Pinned:
    """Result of `pin`: what is pinned now, and what was refused because of a tier's limit."""

    blocks: int = 0
    size_bytes: int = 0
    refused_blocks: int = 0
    refused_bytes: int = 0


@dataclass(slots=True)
class Dropped:
    """Result of `evict` and `unpin`: the blocks changed, the blocks that stayed because they are
    pinned, and the blocks that stayed because their disk does not answer (stuck)."""

    blocks: int = 0
    size_bytes: int = 0
    pinned_blocks: int = 0
    pinned_bytes: int = 0
    stuck_blocks: int = 0

    def add(self, other: "Dropped") -> None:
        """Add the numbers of `other` to this object."""
        self.blocks += other.blocks
        self.size_bytes += other.size_bytes
        self.pinned_blocks += other.pinned_blocks
        self.pinned_bytes += other.pinned_bytes
        self.stuck_blocks += other.stuck_blocks


class PinRoom(NamedTuple):
    """Limit and present amount of pinned data in a tier, in bytes of slots."""

    path: Path
    limit_bytes: int
    pinned_bytes: int


class CachedObjects:
    """Operations on whole object versions. One per mount; its `BlockCache` owns it."""

    def __init__(
        self,
        tiers: Callable[[], Sequence[ActiveTier]],
        admission_filter: AdmissionFilter,
        fetching: Callable[[], set[bytes]],
    ) -> None:
        """`tiers` returns the present tiers, fastest first. `fetching` returns the ids of objects
        that have blocks on their way from the origin into a tier."""
        self._tiers = tiers
        self._fetching = fetching
        self.admission_filter = admission_filter

    # -- asking --------------------------------------------------------------------------------

    async def where(self, ref: ObjectRef) -> CachedShare:
        """Return what the indexes say is cached of the object version. It lets the event loop run
        only if the version is large."""
        tiers = list(self._tiers())
        found = CachedShare([TierShare(a.directory.paths.root, a.directory.medium) for a in tiers])
        seen: set[int] = set()
        for active, share in zip(tiers, found.tiers, strict=True):
            by_id = active.directory.slabs.by_id
            for blocks in _steps(active.store, (ref,)):
                for key, location in blocks:
                    slab = by_id.get(location.slab)
                    pinned = slab is not None and slab.is_pinned(location.slot)
                    share.blocks += 1
                    share.size_bytes += location.length
                    share.pinned_bytes += location.length * pinned
                    if len(tiers) == 1 or key.block_index not in seen:
                        seen.add(key.block_index)
                        found.blocks += 1
                        found.size_bytes += location.length
                        found.pinned_bytes += location.length * pinned
                if len(blocks) >= _STEP_BLOCKS:
                    await trio.lowlevel.checkpoint()
        return found

    def pin_room(self) -> list[PinRoom]:
        """Return limit and present amount of pinned data by tier, fastest first."""
        return [
            PinRoom(
                a.directory.paths.root,
                a.directory.pin_limit_bytes,
                a.directory.slabs.pinned_charge_bytes,
            )
            for a in self._tiers()
        ]

    async def charge_to_pin(self, refs: Sequence[ObjectRef]) -> dict[Path, int]:
        """Return by how many bytes of slots `pin` would increase the pinned data of each tier,
        by the tier's path."""
        charges: dict[Path, int] = {}
        for active in list(self._tiers()):
            charge_bytes = 0
            for blocks in _steps(active.store, refs):
                for _, location in blocks:
                    slab = active.directory.slabs.by_id.get(location.slab)
                    if slab is not None and not slab.is_pinned(location.slot):
                        charge_bytes += slab.charge_bytes
                await trio.lowlevel.checkpoint()
            charges[active.directory.paths.root] = charge_bytes
        return charges

    # -- changing ------------------------------------------------------------------------------

    async def pin(self, refs: Sequence[ObjectRef]) -> Pinned:
        """Pin the cached blocks of these object versions until `unpin`, as far as the
        tiers' limits allow. For blocks that arrive later see `AdmissionFilter.pinning`."""
        result = Pinned()

        def act(store: TierStore, key: BlockKey, slab: Slab, location: BlockLocation) -> None:
            if not slab.is_pinned(location.slot):
                if not store.may_pin(slab.charge_bytes):
                    result.refused_blocks += 1
                    result.refused_bytes += location.length
                    return
                store.slabs.pin(slab, location.slot)
                store.put_row(slab)
            result.blocks += 1
            result.size_bytes += location.length

        for active in list(self._tiers()):
            await self._each(active.store, refs, act)
        return result

    async def unpin(self, refs: Sequence[ObjectRef]) -> Dropped:
        """Unpin the blocks of these object versions, so that they can be evicted."""
        result = Dropped()

        def act(store: TierStore, key: BlockKey, slab: Slab, location: BlockLocation) -> None:
            if store.slabs.unpin(slab, location.slot):
                store.put_row(slab)
                result.blocks += 1
                result.size_bytes += location.length

        self.admission_filter.note_unpinned({ref.object_id for ref in refs})
        for _ in range(self._passes()):
            before = result.blocks
            for active in list(self._tiers()):
                result.stuck_blocks = await self._each(active.store, refs, act)
            if result.blocks == before:
                break
        return result

    async def evict(
        self, refs: Sequence[ObjectRef], pinned_too: bool = False, dry_run: bool = False
    ) -> Dropped:
        """Drop all blocks of these object versions. Pinned blocks stay unless `pinned_too`.
        With `dry_run`, only count them."""
        result = Dropped()

        def act(store: TierStore, key: BlockKey, slab: Slab, location: BlockLocation) -> None:
            if slab.is_pinned(location.slot) and not pinned_too:
                result.pinned_blocks += 1
                result.pinned_bytes += location.length
            else:
                result.blocks += 1
                result.size_bytes += location.length
                if not dry_run:
                    store.moved_away(key, slab, location)
                    store.put_row(slab)

        if pinned_too and not dry_run:
            self.admission_filter.note_unpinned({ref.object_id for ref in refs})
        if not dry_run:
            self._bar({ref.object_id for ref in refs} & self._fetching())
        for _ in range(1 if dry_run else self._passes()):
            before = result.blocks
            result.pinned_blocks = result.pinned_bytes = result.stuck_blocks = 0
            for active in list(self._tiers()):
                result.stuck_blocks += await self._each(active.store, refs, act, not dry_run)
            if result.blocks == before:
                break
        return result

    def _passes(self) -> int:
        return _PASSES if len(self._tiers()) > 1 else 1

    def _bar(self, object_ids: set[bytes]) -> None:
        if object_ids:
            self.admission_filter.note_evicted(object_ids)

    def _bar_moving(self, blocks: Iterable[CachedBlock]) -> None:
        """Refuse copies of these blocks that are moving between tiers now. Call this in the step
        that drops the blocks."""
        for active in self._tiers():
            if moving := active.mover.moving:
                self._bar({key.object_id for key, _ in blocks if key in moving})

    async def _each(
        self, store: TierStore, refs: Sequence[ObjectRef], act: Act, drops: bool = False
    ) -> int:
        """Call `act` for each block of the object versions that is really in the tier. Return the
        number of blocks that could not be checked because the disk does not answer."""
        stuck = 0
        for blocks in _steps(store, refs):
            try:
                known = await self._ready_places(store, blocks)
            except WorkersStoppedError:
                if not store.retired:
                    raise
                break  # the tier is being removed, and its threads have ended
            stuck += len(blocks) - len(known)
            if store.retired:
                break
            if drops:
                self._bar_moving(known)
            for key, location in known:
                slab = store.slabs.by_id.get(location.slab)
                if slab is None or not slab.holds(location.slot):
                    continue
                if store.index.locate(key) == location:
                    act(store, key, slab, location)
            await store.commit_early()
        return stuck

    async def _ready_places(self, store: TierStore, blocks: list[CachedBlock]) -> list[CachedBlock]:
        """Return the blocks whose slab is reconciled and whose slot holds no other block
        (`tier/slab_files.py`)."""
        by_slab: dict[int, list[CachedBlock]] = {}
        for block in blocks:
            by_slab.setdefault(block[1].slab, []).append(block)
        known: list[CachedBlock] = []
        for slab_id, some in by_slab.items():
            slab = store.slabs.by_id.get(slab_id)
            if slab is None:
                known += some
            elif (slab.is_ready or await store.reconcile(slab)) and not store.retired:
                known += await _own(store, slab, some) if store.files.may_have_stale_rows else some
        return known


async def _own(store: TierStore, slab: Slab, blocks: list[CachedBlock]) -> list[CachedBlock]:
    """Return the blocks that the slot table confirms. After a crash, index rows may point
    to slots that now hold other blocks."""
    if slab.fd < 0 or all(
        location.slot < slab.slot_count and slab.verified[location.slot] == location.checksum
        for _, location in blocks
    ):
        return blocks
    layout = slab.layout
    try:
        with slab.in_use():
            table = await store.io.read(
                layout.table_bytes, store.directory.read_table, slab.table_fd, layout
            )
    except OSError:
        store.counters.read_errors += 1
        return []
    entries = [(block, entry_at(table, block[1].slot, slab.mask)) for block in blocks]
    return [block for block, entry in entries if entry is not None and entry.key == block[0]]


def _steps(store: TierStore, refs: Iterable[ObjectRef]) -> Iterator[list[CachedBlock]]:
    """Yield the index rows of these objects, `_STEP_BLOCKS` or a few more at a time; the last list
    may be empty. Each list is looked up when it is requested, so the caller may await between."""
    blocks: list[CachedBlock] = []
    for ref in refs:
        for first in range(0, ref.block_count, _STEP_BLOCKS):
            if store.retired:  # its index may be closed
                return
            blocks += _look_up(store.index, ref, first)
            if len(blocks) >= _STEP_BLOCKS:
                yield blocks
                blocks = []
    yield blocks


def _look_up(index: Index, ref: ObjectRef, first: int) -> Iterable[CachedBlock]:
    stop = min(first + _STEP_BLOCKS, ref.block_count)
    if stop - first > _FEW_BLOCKS:
        return index.blocks_between(ref.object_id, first, stop)
    keys = [BlockKey(ref.object_id, block_index) for block_index in range(first, stop)]
    found = ((key, index.locate(key)) for key in keys)
    return [(key, location) for key, location in found if location is not None]
