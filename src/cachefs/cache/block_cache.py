"""Serves blocks to readers: from memory, from a tier, or from the origin, fetched once.

A read first calls `read_block_now` (on the loop, without waiting). If that returns None, it calls
`read_block`, which uses a worker thread or an in-flight fetch.

A missing block passes through `Fetches` (in flight) -> `FetchedBlocks` (in memory) -> a tier's
index. It is in exactly one of them at every moment, because each step is atomic on the loop. (A
block that no tier stores leaves after `FetchedBlocks`.)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Literal, NamedTuple

import trio

from cachefs.cache.counters import CacheCounters, TierStatus
from cachefs.cache.fetch.fetches import Fetches
from cachefs.cache.fetch.fragments import Fragments
from cachefs.cache.fetch.in_flight import FetchMemory, InFlightFetch
from cachefs.cache.fetch.whole_files import WholeFile, WholeFiles
from cachefs.cache.fetched_blocks import FetchedBlocks
from cachefs.cache.levels.active_tier import ActiveTier
from cachefs.cache.levels.tier_set import TierSet
from cachefs.cache.object_slabs import ObjectSlabs
from cachefs.cache.objects import CachedObjects
from cachefs.cache.policies import DEFAULT_POLICY, make_history
from cachefs.cache.tier.admission_filter import AdmissionFilter
from cachefs.cache.tier.common import CacheOptions, Common
from cachefs.cache.tier.store import OnAdmitted, TierStore
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.errors import CacheDirError, OriginError
from cachefs.origin.base import Origin
from cachefs.shared.tier import SharedTier
from cachefs.types import (
    BLOCK_BYTES,
    BlockKey,
    BlockLocation,
    Buffer,
    ObjectRef,
    Priority,
    Reply,
    Turn,
)

Replying = Literal["hit", "wait"]
"""Where the bytes of a reply come from: from the cache, or from the origin."""
DEFAULT_BUFFER_BYTES = 300 << 20
_DRAIN_S = 10.0
_BLOCKS_PER_TURN = 500
"""Blocks looked up between two checkpoints of the loop: less than 1 ms."""
_PUT_S, _PUT_AGAIN_S = 5.0, 0.02
_MOST_PARTS = 2
"""See `Origin.send`."""
_GIVE_WAY_S = 0.004
"""About the duration of a read from a nearby origin."""


class _Part(NamedTuple):
    """Bytes of one block: in memory, or of a fetch that brings them."""

    block_index: int
    offset: int
    length: int
    source: memoryview | InFlightFetch
    """The bytes themselves, or the fetch."""

    def get(self) -> memoryview:
        """Return the bytes. Raises `OriginError` if the fetch failed."""
        if isinstance(self.source, InFlightFetch):
            return self.source.part(self.block_index, self.offset, self.length)
        return self.source


class BlockCache:
    """The block cache of one mount. Usable while `run` runs; `aclose` ends it and releases the
    tiers, which it owns."""

    def __init__(
        self,
        origin: Origin,
        tiers: Sequence[CacheDirectory],
        policy_name: str = DEFAULT_POLICY,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        verify_full: bool = False,
        scrub_interval_s: float = 0.0,
        patience_s: float = math.inf,
        tolerant: bool = False,
        shared: SharedTier | None = None,
        object_slabs_from_bytes: int | None = None,
    ) -> None:
        """Opens the tiers' indexes. Raises `CacheDirError`; the caller still owns the tiers then.

        `buffer_bytes` bounds the memory of blocks that are being fetched or stored. A read fails
        when nothing has come from the origin for `patience_s`. `CacheOptions` describes
        `policy_name`, `verify_full`, `scrub_interval_s` and `tolerant`. The caller runs `shared`.
        Objects of `object_slabs_from_bytes` or more that are loaded get a slab of their own
        (`ObjectSlabs`).
        """
        self.counters = CacheCounters()
        self.admission_filter = AdmissionFilter()
        history = make_history(policy_name)
        self.verify_full = verify_full
        options = CacheOptions(policy_name, verify_full, scrub_interval_s, tolerant)
        common = Common(options, history, self.admission_filter)
        self._tiers = TierSet(tiers, common)
        self._memory = FetchMemory(buffer_bytes)
        fetched = FetchedBlocks(self._tiers, self._memory)
        self.shared = shared or SharedTier(origin.identity)
        self.shared.demand.is_local = self._tiers.have
        self.shared.demand.local_bytes = self._tiers.cached_bytes
        self._fetches = Fetches(
            origin, history, self.counters, self._memory, patience_s, fetched.admit, self.shared
        )
        self._fragments = Fragments(self._fetches, self._is_unneeded)
        self.object_slabs = ObjectSlabs(self._tiers, fetched.admitting, object_slabs_from_bytes)
        self._whole_files = WholeFiles(
            self._fetches, self._is_unneeded, self.has_free_space, self.object_slabs
        )
        self._in_flight = self._fetches.in_flight
        self._admitting = fetched.admitting
        self._unstored = fetched.unstored
        self.waiting_readers = 0
        """Number of reads that wait for the origin."""
        self.reader_waited_at = -math.inf
        """When the last such read ended, on trio's clock."""
        self._scratch = memoryview(bytearray(BLOCK_BYTES))
        self._nursery: trio.Nursery | None = None
        self._stopped: trio.Event | None = None
        self.partial_checksums = common.partial_checksums
        self.objects = CachedObjects(self._tiers.all, self.admission_filter, self._under_way)

    def _under_way(self) -> set[bytes]:
        """Return the ids of objects with blocks on their way from the origin to a tier."""
        queued = self._fragments.queued
        return {key.object_id for key in (*queued, *self._in_flight, *self._admitting)}

    def _is_unneeded(self, key: BlockKey, queued_at: float) -> bool:
        """Whether a block that was queued at `queued_at` need not be fetched any more."""
        evicted = self.admission_filter.is_unwanted(key, queued_at)
        return evicted or self.is_cached_or_inflight(key)

    # -- readers -------------------------------------------------------------------------------

    def read_block_now(
        self, key: BlockKey, offset: int, length: int, into: memoryview | None = None
    ) -> memoryview | None:
        """Return `length` >= 1 bytes at `offset` of a block, if that needs no waiting.

        None only means that the caller must use `read_block`. Without `into` the next call may
        overwrite the result: use it before the next await. With `into` (at least `length` long) the
        result is the filled part of `into`. The range must lie inside the block.
        """
        fetched = self._admitting.get(key)
        if fetched is not None:
            found: memoryview | None = fetched[offset : offset + length]
            if into is not None and found is not None:
                into[:length] = found
                found = into[:length]
        else:
            buffer = (self._scratch if into is None else into)[:length]
            store = self._tiers.only_store
            if store is not None:
                found = store.read_slot_now(key, offset, length, buffer)
            else:
                found = self._tiers.read_slot_now(key, offset, length, buffer)
            if found is None:
                return None
        counters = self.counters
        counters.hits += 1
        counters.hit_bytes += length
        return found

    async def read_block(
        self, ref: ObjectRef, block_index: int, offset: int, length: int, is_random: bool = False
    ) -> Buffer:
        """Return `length` >= 1 bytes at `offset` of a block, from a tier or the origin.

        The range must lie inside the block. The bytes stay valid and unchanged. With `is_random`,
        the origin may send the range before the block (`Fragments`). Raises `OriginError` if the
        block isn't cached and the origin fails.
        """
        key = BlockKey(ref.object_id, block_index)
        fetched = self._admitting.get(key)
        if fetched is not None:
            self._count_hit(length)
            return fetched[offset : offset + length]
        if key not in self._in_flight:
            if self._tiers.are_cold:
                await self._tiers.bring(key)
            asked: list[ActiveTier] = []
            while (active := self._tiers.holder(key, asked)) is not None:
                asked.append(active)
                data = await active.store.read_slot(key, offset, length)
                if data is not None:
                    self._count_hit(length)
                    return data
            unstored = self._unstored.get(key)
            if unstored is not None:
                self._count_hit(length)
                return unstored[offset : offset + length]
        return await self._fetched_bytes(ref, key, offset, length, is_random)

    def reply(
        self, ref: ObjectRef, reply: Reply, on_replied: Callable[[bool], None]
    ) -> Replying | None:
        """Begin to answer a READ of at most two blocks: with bytes in memory that wait to be stored
        (a hit), with bytes that are on their way, or, in a file of one block, by a fetch
        (`Fetches.reply`). Return None, and do nothing, if the caller must use `read_block`."""
        parts = self._parts(ref, reply) if self._fetches.sends else None
        if parts and not any(isinstance(part.source, InFlightFetch) for part in parts):
            has_begun = self._fetches.send([part.get() for part in parts], reply, on_replied)
            return "hit" if has_begun else None

        def end(is_replied: bool) -> None:
            self.waiting_readers -= 1
            self.reader_waited_at = trio.current_time()
            self.counters.misses += is_replied
            on_replied(is_replied)

        if parts:
            self._reply_later(parts, reply, end)
        elif not self._may_fetch_for(ref) or not self._fetches.reply(ref, reply, end):
            return None
        self.waiting_readers += 1
        return "wait"

    def _parts(self, ref: ObjectRef, reply: Reply) -> list[_Part] | None:
        """Return the parts of a reply if all of them are in memory, or come without a further
        request; else None. A range in one block is not read from a tier: that needs no copy."""
        parts: list[_Part] = []
        offset, end = reply.offset, reply.offset + reply.length
        while offset < end:
            index, start = divmod(offset, BLOCK_BYTES)
            length = min(end - offset, BLOCK_BYTES - start)
            key = BlockKey(ref.object_id, index)
            source: memoryview | InFlightFetch | None = self._in_flight.get(key)
            if source is None and key in self._admitting:
                source = self.read_block_now(key, start, length)
            elif source is None and length < reply.length:
                source = self.read_block_now(key, start, length, memoryview(bytearray(length)))
            if source is None or len(parts) == _MOST_PARTS:
                return None
            parts.append(_Part(index, start, length, source))
            offset += length
        return parts

    def _reply_later(
        self, parts: list[_Part], reply: Reply, on_replied: Callable[[bool], None]
    ) -> None:
        """Answer a READ when all its bytes are there. Raises `OriginUnavailableError` at
        shutdown."""
        left = [part.source for part in parts if isinstance(part.source, InFlightFetch)]

        def go_on(is_over: bool) -> None:
            has_begun = False
            with suppress(OriginError):  # the caller's `read_block` meets it, too
                if is_over and left:
                    self._fetches.tell(left.pop(), go_on)
                    has_begun = True
                elif is_over:
                    has_begun = self._fetches.send(
                        [part.get() for part in parts], reply, on_replied
                    )
            if not has_begun:
                on_replied(False)

        self._fetches.tell(left.pop(), go_on)

    def _may_fetch_for(self, ref: ObjectRef) -> bool:
        """Whether `Fetches.reply` may fetch the file."""
        key = BlockKey(ref.object_id, 0)
        if ref.block_count > 1 or self._tiers.are_cold or self.is_cached_or_inflight(key):
            return False
        return self._fetches.failed_lately(key) is None

    async def _fetched_bytes(
        self, ref: ObjectRef, key: BlockKey, offset: int, length: int, is_random: bool
    ) -> memoryview:
        """Return bytes of a block from an in-flight fetch, a new one, or a fragment.

        A tier that could not read the block is not tried again, even if its index still has it.
        """
        fetched = self._admitting.get(key)
        if fetched is not None:  # it came while `read_block` tried the tiers
            self._count_hit(length)
            return fetched[offset : offset + length]
        fetch = self._in_flight.get(key) or self._fetches.failed_lately(key)
        if fetch is None and is_random and not self.shared.serves_most:
            fetch = self._fragments.start(ref, key, offset, length)
        if fetch is None:
            fetch = self._fetches.start(ref, key.block_index, 1)
        self.counters.misses += 1
        self.waiting_readers += 1
        try:
            await self._fetches.wait_for(fetch)
            is_quick_failure = fetch.error is not None and not fetch.failed_slowly
            if is_quick_failure and fetch.block_count > 1 and self.shared.is_on:
                # Other blocks of the run may be the ones that the shared tier does not have.
                fetch = self._in_flight.get(key) or self._fetches.start(ref, key.block_index, 1)
                await self._fetches.wait_for(fetch)
        finally:
            self.waiting_readers -= 1
            self.reader_waited_at = trio.current_time()
        return fetch.part(key.block_index, offset, length)

    async def give_way(self) -> None:
        """Let the loop run between two pieces of work that can wait.

        Sleeps for `_GIVE_WAY_S` while readers wait for the origin. Such a read takes about ten
        turns of the loop, and could otherwise be delayed by one piece of work in each turn.
        """
        if self.waiting_readers:
            await trio.sleep(_GIVE_WAY_S)
        else:
            await trio.lowlevel.checkpoint()

    # -- processes that read blocks without the cache (`publisher.py`) -------------------------

    def find_verified(self, key: BlockKey) -> tuple[TierStore, BlockLocation] | None:
        """Return store and location of a block that the relay may read; see
        `TierStore.find_verified`."""
        return self._tiers.find_verified(key)

    def tell_admitted(self, on_admitted: OnAdmitted) -> None:
        """Call `on_admitted` whenever a tier has stored a block."""
        self._tiers.tell_admitted(on_admitted)

    def _count_hit(self, length: int) -> None:
        self.counters.hits += 1
        self.counters.hit_bytes += length

    def is_cached_or_inflight(self, key: BlockKey) -> bool:
        """Whether the block is in memory, in flight, or in a usable tier: don't fetch it ahead."""
        is_coming = key in self._admitting or key in self._in_flight
        return is_coming or self._tiers.have(key) or key in self._unstored

    def is_in_flight(self, key: BlockKey) -> bool:
        """Whether the block is being fetched from the origin."""
        return key in self._in_flight

    def fetch(
        self,
        ref: ObjectRef,
        first_block: int,
        block_count: int,
        ahead: bool = False,
        priority: Priority = Priority.READ_AHEAD,
    ) -> None:
        """Start to fetch a run of blocks (at most 8 MiB), and return at once.

        Sends one GET per gap between blocks that are cached or in flight. A GET has at most
        `Fetches.best_read_bytes`, which is smaller when the connection is slow or limited. Readers
        that join the fetch receive its errors; otherwise they are dropped. With `ahead`, blocks
        that no tier takes stay in memory for a while, for the expected reader.
        """
        end = min(first_block + block_count, ref.block_count)
        most = max(1, min(block_count, self._fetches.best_read_bytes // BLOCK_BYTES))
        run = 0  # number of blocks before `index` that are not known and not started yet
        for index in range(first_block, end + 1):
            known = index == end or self.is_cached_or_inflight(BlockKey(ref.object_id, index))
            if run and (known or run >= most):
                self._fetches.start(ref, index - run, run, Turn(priority), ahead)
                run = 0
            if not known:
                run += 1

    def fetch_into_free_space(self, ref: ObjectRef) -> InFlightFetch:
        """Start to fetch a file of one block that no reader has asked for, and return at once.

        The block must be neither cached nor in flight. No tier evicts another block for it, unless
        a reader joins the fetch. Waiting for `done` of the result does not join it. Raises
        `OriginUnavailableError` at shutdown.
        """
        turn = Turn(Priority.READ_AHEAD)
        return self._fetches.start(ref, 0, 1, turn, ahead=True, into_free_space=True)

    def fetch_whole(self, ref: ObjectRef, place: int, is_next: bool = False) -> WholeFile | None:
        """Begin to fetch all missing blocks of a file, first those from block `place` on, and
        return at once; see `WholeFiles.start`."""
        return self._whole_files.start(ref, place, is_next)

    def has_free_space(self, key: BlockKey, length: int, more_bytes: int = 0) -> bool:
        """Whether a tier that may store the block has space for it, for `more_bytes` and for all
        blocks on their way, without any eviction."""
        if self.object_slabs.has(key.object_id):
            return True
        level = 0
        while (target := self._tiers.entry(key, length, level)) is not None:
            if target.has_free_space(length, self.held_bytes + more_bytes):
                return True
            level = target.level + 1
        return False

    def put_ahead(self, ref: ObjectRef, data: Buffer) -> None:
        """Take the bytes of a whole file of one block, which came with a look-up.

        They are dropped if the block is already cached or in flight, or if the buffer is full.
        """
        block = memoryview(data)
        is_whole = block.nbytes == ref.meta.size_bytes and ref.block_count == 1
        if is_whole and not self.is_cached_or_inflight(BlockKey(ref.object_id, 0)):
            block = block.cast("B") if block.format != "B" else block
            if self._fetches.put(ref, block):
                self.shared.put(ref, block)

    async def put_written(self, ref: ObjectRef, block_index: int, data: bytes) -> None:
        """Take a block that a process of this machine has written. Waits while the buffer is full,
        at most `_PUT_S`; the block is then dropped. So is a block that is cached or in flight."""
        with trio.move_on_after(_PUT_S):
            while not self.is_cached_or_inflight(BlockKey(ref.object_id, block_index)):
                if self._fetches.put(ref, memoryview(data), block_index):
                    return
                await trio.sleep(_PUT_AGAIN_S)

    async def drop_version(self, ref: ObjectRef) -> None:
        """Drop all blocks of an object version whose bytes are other ones now, pinned blocks, too.
        Nobody may read or fetch the version meanwhile. Waits until no block is on its way into a
        tier, at most `_PUT_S`."""
        for index in range(ref.block_count):
            if index % _BLOCKS_PER_TURN == _BLOCKS_PER_TURN - 1:
                await self.give_way()
            if self.is_cached_or_inflight(BlockKey(ref.object_id, index)):
                break
        else:
            return
        with trio.move_on_after(_PUT_S):
            is_left = True
            while is_left:
                await self.objects.evict([ref], pinned_too=True)
                self._unstored.drop(ref.object_id)
                is_left = ref.object_id in self._under_way()
                if is_left:
                    await trio.sleep(_PUT_AGAIN_S)

    async def copy_blocks(self, before: ObjectRef, after: ObjectRef) -> None:
        """Cache the blocks of `before`, as far as they are cached, also as those of `after`, which
        has the same bytes."""
        for index in range(before.block_count):
            key = BlockKey(before.object_id, index)
            length = before.block_length(index)
            data = self.read_block_now(key, 0, length)
            if data is not None:
                await self.put_written(after, index, bytes(data))
            elif self.is_cached_or_inflight(key):
                with suppress(OriginError):
                    whole = await self.read_block(before, index, 0, length)
                    await self.put_written(after, index, bytes(whole))

    async def fetched(self, ref: ObjectRef, first_block: int, block_count: int) -> None:
        """Wait for the in-flight fetches of these blocks. Raises `OriginError` if one failed."""
        end = min(first_block + block_count, ref.block_count)
        await self._fetches.fetched(ref, range(first_block, end))

    async def fetch_together(self, refs: Sequence[ObjectRef], at_a_time: int) -> list[ObjectRef]:
        """Fetch different files of one block each in one call of the origin, `at_a_time` in
        parallel, as long as no reader waits.

        Returns the files that are not fetched: those that the caller must fetch one by one, and
        those that were already cached or in flight. Raises `OriginError` at shutdown only.
        """
        known = [self.is_cached_or_inflight(BlockKey(ref.object_id, 0)) for ref in refs]
        left = list(compress(refs, known))
        unknown = [ref for ref, is_known in zip(refs, known, strict=True) if not is_known]
        if unknown:
            left += await self._fetches.together(unknown, at_a_time, self._has_waiting_readers)
        return left

    def _has_waiting_readers(self) -> bool:
        return self.waiting_readers > 0

    @property
    def origin_is_far(self) -> bool:
        """Whether each request to the origin takes long, however small: see `Fetches.is_far`."""
        return self._fetches.is_far

    @property
    def fetching_count(self) -> int:
        """Number of blocks in flight from the origin."""
        return len(self._in_flight)

    @property
    def storing_count(self) -> int:
        """Number of fetched blocks that are not in a tier yet."""
        return len(self._admitting)

    @property
    def held_bytes(self) -> int:
        """Buffer memory of blocks that are in flight or wait to be stored."""
        return self._memory.used_bytes

    @property
    def is_reconciled(self) -> bool:
        """Whether all usable tiers are reconciled after a crash: a block not found is not there."""
        return not any(active.store.files.must_reconcile for active in self._tiers if active.usable)

    def is_stored(self, ref: ObjectRef) -> bool:
        """Whether all blocks of the object version are in usable tiers."""
        return all(
            self._tiers.have(BlockKey(ref.object_id, index)) for index in range(ref.block_count)
        )

    async def cached_fraction(self, ref: ObjectRef) -> float:
        """Return the cached share of an object version's bytes, 0 to 1; 1 for an empty object.

        Counts in pieces of `_BLOCKS_PER_TURN` blocks and lets the loop run between them.
        """
        if ref.meta.size_bytes == 0:
            return 1.0
        cached_bytes = 0
        for first in range(0, ref.block_count, _BLOCKS_PER_TURN):
            if first:
                await self.give_way()
            lengths: dict[int, int] = {}
            for active in self._tiers:
                index = active.store.index
                stop = first + _BLOCKS_PER_TURN
                for key, location in index.blocks_between(ref.object_id, first, stop):
                    lengths[key.block_index] = location.length
            cached_bytes += sum(lengths.values())
        return min(1.0, cached_bytes / ref.meta.size_bytes)

    # -- tiers ---------------------------------------------------------------------------------

    async def add_tier(self, tier: CacheDirectory) -> None:
        """Add a cache directory to the mount. Raises `CacheDirError`; the caller still owns `tier`
        then."""
        if self._nursery is None:
            raise CacheDirError("the mount is shutting down")
        await self._tiers.add(tier, self._nursery)

    async def remove_tier(self, path: Path) -> None:
        """Remove a cache directory from the mount. Its blocks stay there for a later `add_tier`.

        Raises `CacheDirError` if there is no such tier.
        """
        await self._tiers.remove(path)

    async def resize_tier(self, path: Path, quota_bytes: int) -> None:
        """Change a tier's quota. A background task deletes the slabs above it, one by one.

        Raises `CacheDirError` if there is no such tier, or if its pinned blocks need more.
        """
        self._tiers.resize(path, quota_bytes)

    # -- life ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or closed. `task_status` reports when reads may begin."""
        self._stopped = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                for active in self._tiers:
                    await nursery.start(active.run)
                self._nursery = self._fetches.nursery = nursery
                nursery.start_soon(self.object_slabs.run)
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:  # before it closes: nothing may be started in a closed one
                    self._nursery = self._fetches.nursery = None
        finally:
            self._stopped.set()

    async def drain(self) -> None:
        """Wait until all blocks fetched so far are stored or given up."""
        for active in self._tiers.all():  # fastest first: a refused block goes to slower tiers only
            await active.admission.drained()

    async def aclose(self, drain_s: float = _DRAIN_S) -> None:
        """Store the fetched blocks (for at most `drain_s`), end `run`, commit, close the tiers."""
        self._whole_files.stop()
        with trio.CancelScope(shield=True):
            if self._nursery is not None:
                with trio.move_on_after(drain_s):
                    await self.drain()
                self._nursery.cancel_scope.cancel()
            tiers = self._tiers.take_all()
            for active in tiers:
                active.retire()
            async with trio.open_nursery() as nursery:
                for active in tiers:
                    nursery.start_soon(active.close)
            if self._stopped is not None:
                await self._stopped.wait()

    def abandon(self) -> None:
        """Close without writing anything, as a crash does; for tests. `run` must have ended."""
        for active in self._tiers:
            active.abandon()

    def status(self) -> list[TierStatus]:
        """Return the state of each tier, fastest first."""
        return [active.status() for active in self._tiers]
