"""For training: a resident block goes only when it has been idle longer than blocks wait for reuse.

Training reads every file once per epoch in a fresh random order. With room for the fraction f of
the data no policy can hit more than f, and keeping whatever is there does; LRU hits f*f and less,
because it drops just what is read next. Yet a cache must make room for the next data set.

The rule. Every read of a block that was read before is a *reuse*, its *interval* the number of
block reads between. A resident block is *expired* when it has been idle for longer than 1.05
times the longest interval among recent reuses. Only expired blocks are replaced; while there are
none the newcomer is served and not kept. With no reuse seen yet nothing is expired.

Why it holds: in shuffled epochs of N blocks, at a read p blocks into an epoch, intervals are
uniform over p..p+N, and the oldest resident has been idle for p+N at most: nothing expires. After
a switch to other data the old blocks' ages grow beyond the new data's intervals, and all go.

"Recent" is the present generation of reuses and the one before. A generation has at least
`_GENERATION_REUSES`, and lasts for 1/256 of the longest interval at least: long enough to see some
of the slow reuses of a large data set between very many quick ones of a small one, short enough
that a small data set gets in after a large one.

Reuses of blocks that are not resident count too: else a cache full of old data would never learn
of the new. `_Ghosts` remembers when they were read, in 8 MiB that newer entries overwrite. With
more misses between than it has entries it mostly forgets, and then mostly short intervals are
seen; the residents' reuses give the long ones.

Simulated and measured hit ratios: `python -m bench.engine hit_ratio`.
"""

from array import array
from collections.abc import Sequence

from typing_extensions import override

from cachefs.cache.policies.base import CLOCK_MASK, SAMPLE_BLOCKS, EvictionPolicy, History, rank_of
from cachefs.tiers.slabs import Slab
from cachefs.types import BlockKey

_GENERATION_REUSES = 128
_GENERATION_SHARE = 256
_SLACK = 1.05
_GHOST_BITS = 20
_LIVE_SHARE = 0.25
"""A slab with no more of its slots in use by unexpired blocks may be given to another class."""


class ReuseHistory(History):
    """The clock, the ghosts, and the longest interval of the last two generations."""

    __slots__ = ("_ghosts", "_longest_before", "_reuses", "_started", "longest")

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = _Ghosts()
        self.longest = 0
        """Of the present generation."""
        self._longest_before = 0
        self._reuses = 0
        self._started = 0

    def expiry(self) -> int | None:
        """The age from which on a block is expired; None while too little was seen."""
        if self._longest_before == 0:
            return None
        return int(max(self.longest, self._longest_before) * _SLACK) + 1

    def on_reuse(self, interval: int) -> None:
        """A block was read again."""
        self.longest = max(self.longest, interval)
        self._reuses += 1
        if self._reuses >= _GENERATION_REUSES:
            self._roll()

    def _roll(self) -> None:
        lasted = (self.now - self._started) & CLOCK_MASK
        if lasted * _GENERATION_SHARE < max(self.longest, self._longest_before):
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
    """Key to clock, for a million keys at most: a newer key with the same place takes it."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries = array("Q", bytes(8 << _GHOST_BITS))

    def exchange(self, key: BlockKey, now: int) -> int | None:
        """Note the key's use at `now`; the interval since its last if that is still known."""
        # Object ids are uniformly distributed; the factor spreads the blocks of one object.
        mixed = (int.from_bytes(key[0][:8], "little") + key[1] * 0x9E3779B97F4A7C15) >> 1
        place = mixed & ((1 << _GHOST_BITS) - 1)
        tag = (mixed >> _GHOST_BITS) & 0xFFFFFFFF
        entry = self._entries[place]
        self._entries[place] = tag << 32 | now
        if entry == 0 or entry >> 32 != tag:
            return None
        return (now - entry) & CLOCK_MASK


class EpochPolicy(EvictionPolicy):
    """See the module docstring. The default."""

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
        """The oldest go first, and none that isn't expired."""
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
            return slab.loose_count == 0
        slots = self._sample_slab(slab, 32)
        live = sum(self.age(slab, slot) < expiry for slot in slots) / max(1, len(slots))
        return live * slab.loose_count <= _LIVE_SHARE * slab.slot_count
