"""The policy for training: evict a block only if it is idle longer than blocks wait for reuse.

Training reads every file once per epoch in a new random order. If the cache has room for the
fraction f of the data, no policy can hit more than f, and a cache that never replaces a block
reaches f. LRU hits f*f or less, because it drops the blocks that are read next. But a cache must
also make room for the next data set.

The rule: every read of a block that was read before is a *reuse*. Its *interval* is the number of
block reads since the last read of the block. A resident block is *expired* when it is idle for
longer than 1.05 times the longest interval of recent reuses. Only expired blocks are replaced. If
none is expired, the new block is served and not stored. While the first period of reuses (see
below) lasts, no block expires.

Why it works: in shuffled epochs of N blocks, at a read p blocks into an epoch, intervals are
uniform over p..p+N. The oldest resident block is idle for p+N at most, so no block expires. After
a switch to other data, the ages of the old blocks exceed the intervals of the new data, and all
old blocks expire.

"Recent" means the present period of reuses and the one before. A period has at least
`_PERIOD_REUSES` reuses, and lasts for at least 1/256 of the longest interval. This is long
enough to include some slow reuses of a large data set between many quick ones of a small data set.
It is short enough that a small data set gets space after a large one.

Reuses of blocks that are not resident count too. Otherwise a cache full of old data would never
replace it. `_Ghosts` stores when such blocks were read, in 8 MiB that newer entries overwrite. If
more misses than its entries lie between two reads, it has mostly lost the first. Then it yields
mostly short intervals, and the reuses of resident blocks yield the long ones.

Simulated and measured hit ratios: `python -m bench.engine hit_ratio`.
"""

from array import array
from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import CLOCK_MASK, SAMPLE_BLOCKS, EvictionPolicy, History, rank_of
from cachefs.cache_dir.slab import Slab
from cachefs.types import BlockKey

_PERIOD_REUSES = 128
_PERIOD_SHARE = 256
_SLACK = 1.05
_GHOST_BITS = 20
_LIVE_SHARE = 0.25
"""A slab may go to another slot class if at most this share of its slots hold unexpired blocks."""


class ReuseHistory(History):
    """The clock, the ghosts, and the longest interval of each of the last two periods."""

    __slots__ = ("_ghosts", "_longest_before", "_reuses", "_started", "longest")

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = _Ghosts()
        self.longest = 0
        """The longest interval of the present period, in block reads."""
        self._longest_before = 0
        self._reuses = 0
        self._started = 0

    def expiry(self) -> int | None:
        """Return the age from which a block is expired, in block reads; None before the end of the
        first period."""
        if self._longest_before == 0:
            return None
        return int(max(self.longest, self._longest_before) * _SLACK) + 1

    def on_reuse(self, interval: int) -> None:
        """Record that a block was read again after `interval` block reads."""
        self.longest = max(self.longest, interval)
        self._reuses += 1
        if self._reuses >= _PERIOD_REUSES:
            self._roll()

    def _roll(self) -> None:
        lasted = (self.now - self._started) & CLOCK_MASK
        if lasted * _PERIOD_SHARE < max(self.longest, self._longest_before):
            return
        self._longest_before = self.longest
        self.longest = 0
        self._reuses = 0
        self._started = self.now

    @override
    def on_miss(self, key: BlockKey) -> None:
        now = self.now = (self.now + 1) & CLOCK_MASK
        interval = self._ghosts.exchange(key, now)
        if interval is not None:
            self.on_reuse(interval)

    @override
    def on_evict(self, key: BlockKey, age: int) -> None:
        self._ghosts.exchange(key, (self.now - age) & CLOCK_MASK)


class _Ghosts:
    """The clock value of the last use by key, for at most a million keys. A newer key overwrites
    an older one with the same position."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries = array("Q", bytes(8 << _GHOST_BITS))

    def exchange(self, key: BlockKey, now: int) -> int | None:
        """Record a use of the key at `now`. Return the interval since its last use; None if that
        is not stored any more."""
        # Object ids are uniformly distributed; the factor spreads the blocks of one object.
        mixed = (int.from_bytes(key[0][:8], "little") + key[1] * 0x9E3779B97F4A7C15) >> 1
        position = mixed & ((1 << _GHOST_BITS) - 1)
        tag = (mixed >> _GHOST_BITS) & 0xFFFFFFFF
        entry = self._entries[position]
        self._entries[position] = tag << 32 | now
        if entry == 0 or entry >> 32 != tag:
            return None
        return (now - entry) & CLOCK_MASK


class EpochPolicy(EvictionPolicy):
    """The default policy. See the module docstring."""

    name = "epoch"

    _history: ReuseHistory

    @override
    def on_hit(self, slab: Slab, slot: int) -> None:
        history = self._history
        now = history.now = (history.now + 1) & CLOCK_MASK
        history.on_reuse((now - slab.ticks[slot]) & CLOCK_MASK)
        slab.ticks[slot] = now

    @override
    def plan(
        self, slabs: Sequence[Slab], fraction: float, sample_blocks: int = SAMPLE_BLOCKS
    ) -> float | None:
        """Return a plan that evicts the oldest blocks, but only expired ones."""
        expiry = self._history.expiry()
        if expiry is None:
            return None
        ages = self._oldest_first(slabs, sample_blocks)
        if not ages or ages[0] < expiry:
            return None
        return max(expiry, ages[rank_of(ages, fraction)])

    @override
    def may_empty(self, slab: Slab) -> bool:
        expiry = self._history.expiry()
        if expiry is None:
            return slab.evictable_count == 0
        slots = self._sample_slab(slab, 32)
        live = sum(self.age(slab, slot) < expiry for slot in slots) / max(1, len(slots))
        return live * slab.evictable_count <= _LIVE_SHARE * slab.slot_count
