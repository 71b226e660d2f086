"""One active tier: assembles its parts, and starts and stops them."""

import logging
from typing import Protocol

import trio

from cachefs.cache.counters import TierStatus
from cachefs.cache.levels.mover import Mover, Promoter
from cachefs.cache.levels.placement import TierPlace, promotes
from cachefs.cache.tier.admission import Admission
from cachefs.cache.tier.common import Common
from cachefs.cache.tier.evictor import Evictor
from cachefs.cache.tier.store import TierStore
from cachefs.cache.tier.upkeep.scrubber import Scrubber
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.errors import CacheDirError
from cachefs.format.slab import class_of
from cachefs.types import BlockKey
from cachefs.units import format_bytes

log = logging.getLogger(__name__)

_COMMIT_RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0
"""How long a closing tier waits for its threads: a disk that hangs must not block the shutdown."""


class Neighbours(Protocol):
    """What one tier can ask about the other tiers of the mount; `TierSet` implements it."""

    def below(self, tier: "ActiveTier", key: BlockKey, length: int) -> Admission | None:
        """Return the admission of the slower tier that takes the block on demotion, or None."""

    def above(self, tier: "ActiveTier", key: BlockKey) -> "ActiveTier | None":
        """Return the block's home tier in the next faster level, or None."""


class ActiveTier:
    """See the module docstring. The owner, `TierSet`, updates `level` when tiers are added,
    removed or resized."""

    def __init__(self, directory: CacheDirectory, common: Common, neighbours: Neighbours) -> None:
        """Opens the index. Raises `CacheDirError`; the caller still owns `directory` then."""
        self.directory = directory
        self.level = 0
        self._neighbours = neighbours
        self.store = TierStore(directory, common)
        self.evictor = Evictor(self.store)
        self.admission = Admission(self.store, self.evictor, common.cooldown)
        self.mover = Mover(self.store, common.cooldown, self._target_below)
        self.promoter = Promoter(self.mover, self.store, common.cooldown, self._target_above)
        self._scrubber = Scrubber(self.store, common.options.scrub_interval_s)
        self.store.io.on_change = self._health_changed
        self._scope = trio.CancelScope()
        self._stopped: trio.Event | None = None

    @property
    def usable(self) -> bool:
        """Whether the disk is healthy enough to use and the tier is not retired."""
        return self.store.io.health.usable and not self.store.retired

    @property
    def place(self) -> TierPlace:
        """The tier's entry for `Placement`."""
        return TierPlace(self.directory.identity.uuid, self.directory.quota_bytes, self.level)

    def connect(self, level: int, level_count: int) -> None:
        """Set the tier's `level` (0 is the fastest) of `level_count`."""
        self.level = level
        self.evictor.demote = self.mover.demote if level < level_count - 1 else None
        self.store.on_lower_hit = self._hit if level else None

    # -- neighbours ----------------------------------------------------------------------------

    def _target_below(self, key: BlockKey, length: int) -> Admission | None:
        return None if self.store.retired else self._neighbours.below(self, key, length)

    def _target_above(self, key: BlockKey, length: int) -> Admission | None:
        if self.store.retired:  # a retired tier has no neighbours
            return None
        # None if this tier has become the fastest since the block was queued for promotion.
        above = self._neighbours.above(self, key)
        return above.admission if above is not None and above.admission.takes(length) else None

    def _hit(self, key: BlockKey, age: int) -> None:
        above = self._neighbours.above(self, key)
        if above is not None and promotes(age, above.evictor.oldest_age, above.has_room()):
            self.promoter.want(key)

    def takes(self, key: BlockKey, length: int) -> bool:
        """Whether the tier would probably store the block, and pin it if users request that."""
        return self.admission.takes(length) and (
            not self.store.admission_filter.must_be_pinned(key) or self.store.may_pin(length)
        )

    def refuse_to_lose_pinned(self, quota_bytes: int) -> None:
        """Raises `CacheDirError` if the pinned blocks would not fit into `quota_bytes`."""
        directory = self.directory
        pinned_bytes = directory.slabs.pinned_charge_bytes
        slab_bytes = directory.identity.slab_bytes
        if pinned_bytes > quota_bytes // slab_bytes * slab_bytes:
            raise CacheDirError(
                f"{format_bytes(pinned_bytes)} are pinned in {directory.paths.root}, more than "
                f"{format_bytes(quota_bytes)}: nothing was changed; unpin some first"
            )

    def has_room(self) -> bool:
        """Whether the tier can take promoted blocks without evicting others."""
        return self.directory.slabs.used_charge_bytes < self.directory.watermarks.low_bytes

    def has_free_space(self, length: int, coming_bytes: int) -> bool:
        """Whether the tier can store a block of `length` bytes after `coming_bytes` of others, all
        without eviction. `coming_bytes` counts against the watermark only."""
        fits = self.directory.fits_below_low(coming_bytes + length)
        return fits and self.evictor.has_room(class_of(length))

    def _health_changed(self) -> None:
        if not self.store.io.health.usable:
            self.store.slabs.withdraw_all()
            self.admission.give_up()

    def status(self) -> TierStatus:
        """Return sizes, limits, health and statistics of the tier."""
        directory = self.directory
        return TierStatus(
            path=str(directory.paths.root),
            medium=directory.medium,
            health=self.store.io.health.state.value,
            quota_bytes=directory.quota_bytes,
            capacity_bytes=directory.slabs.capacity_bytes,
            disk_bytes=directory.slabs.disk_bytes,
            used_bytes=directory.slabs.used_charge_bytes,
            high_bytes=directory.watermarks.high_bytes,
            low_bytes=directory.watermarks.low_bytes,
            cached_bytes=directory.slabs.cached_bytes,
            cached_blocks=directory.slabs.cached_blocks,
            pinned_bytes=directory.slabs.pinned_charge_bytes,
            pin_limit_bytes=directory.pin_limit_bytes,
            counters=self.store.counters,
        )

    # -- life ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the tier's tasks until `close`, or until cancelled."""
        self._stopped = trio.Event()
        store = self.store
        store.io.start()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(store.io.watch)
                    nursery.start_soon(self.admission.watch)
                    task_status.started()
                    await self._commit_that_it_is_open()
                    for part in (self.admission, self.evictor, self.promoter, self._scrubber):
                        nursery.start_soon(part.run)
                    nursery.start_soon(self._warm_and_reconcile)
                    nursery.start_soon(store.commit_loop)
                    nursery.start_soon(store.index.keep_warm)
        finally:
            self._stopped.set()

    async def _commit_that_it_is_open(self) -> None:
        """Commit the deletion of the clean mark.

        This must happen before any slot changes: a crash could otherwise leave the old mark. While
        the commit fails, the tier serves its blocks but stores none.
        """
        index, admission = self.store.index, self.admission
        if await index.commit() or self.store.files.must_reconcile:
            return
        admission.closed = True
        admission.give_up()
        while not await index.commit():  # noqa: ASYNC110 - nothing tells when there is space
            await trio.sleep(_COMMIT_RETRY_S)
        admission.closed = self.store.retired

    async def _warm_and_reconcile(self) -> None:
        """Do the start-up work that the first read does not need."""
        # Loaded into memory, the index answers look-ups without waiting for the disk.
        await trio.to_thread.run_sync(self.store.index.warm, abandon_on_cancel=True)
        await self.store.files.reconcile_all()

    def retire(self) -> None:
        """Stop serving and storing blocks."""
        self.store.retired = True
        self.store.slabs.withdraw_all()
        self.admission.closed = True
        self.admission.give_up()

    async def close(self) -> None:
        """End `run`, commit and release the directory. The tier must not be used afterwards.

        If the disk does not answer within `CLOSE_TIMEOUT_S`, descriptors and lock stay open until
        the process ends.
        """
        self._scope.cancel()
        store = self.store
        if self._stopped is not None:
            with trio.move_on_after(CLOSE_TIMEOUT_S) as patience:
                await self._stopped.wait()
                await store.io.idle()  # a reader's thread may still use a slab's descriptor
            store.io.stop()
            # The last reader's task and this one became runnable together; let it finish first.
            await trio.lowlevel.checkpoint()
            if patience.cancelled_caught:
                store.io.detach()
                await self._stopped.wait()
                log.warning(
                    "%s: the disk does not answer; left as it is", self.directory.paths.root
                )
                return  # the process keeps descriptors and lock until it ends
        if store.io.health.usable:
            await store.index.commit()
            store.close()
        else:
            store.abandon()

    def abandon(self) -> None:
        """Close without writing anything, as a crash does; for tests. `run` must have ended."""
        self.store.io.stop()
        self.store.abandon()
