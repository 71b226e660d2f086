"""What the cache has done since it was started. Plain numbers; `metrics` names them for users."""

from dataclasses import dataclass

from cachefs.types import Medium


@dataclass(slots=True)
class CacheCounters:
    """One for all tiers. Reads are counted once each, by block."""

    hits: int = 0
    """Reads served from a tier, or from fetched bytes on their way to one."""
    misses: int = 0
    """Reads that had to wait for the origin, their own flight or another's."""
    hit_bytes: int = 0
    fetches: int = 0
    """GETs sent to the origin."""
    fetched_bytes: int = 0
    fetch_errors: int = 0


@dataclass(slots=True)
class TierCounters:
    """One for each tier."""

    hits: int = 0
    hit_bytes: int = 0
    admitted: int = 0
    admitted_bytes: int = 0
    rejected: int = 0
    """Blocks that were served and not kept: no room, or the policy said no."""
    evicted: int = 0
    """Blocks dropped to make room."""
    demoted: int = 0
    """Blocks that went from here to a slower tier to make room."""
    promoted: int = 0
    """Blocks that came here from a slower tier because they are read often."""
    verified: int = 0
    """Blocks whose checksum was compared, on a read or by the scrubber."""
    bad_blocks: int = 0
    """Index entries whose bytes were not the ones promised; dropped and fetched again."""
    bad_slabs: int = 0
    """Slab files that were missing or had a header that isn't theirs."""
    bad_index: int = 0
    """Indexes that could not be used and were made anew from the slabs."""
    adopted: int = 0
    """Blocks that a slot table knew and the index had lost."""
    reassigned: int = 0
    """Slabs given to another size class."""
    write_errors: int = 0
    read_errors: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A tier as `cachefs status` shows it."""

    path: str
    medium: Medium
    health: str
    """normal, unstable or down."""
    quota_bytes: int
    disk_bytes: int
    used_bytes: int
    """Charged slots: what the watermarks look at."""
    high_bytes: int
    low_bytes: int
    cached_bytes: int
    cached_blocks: int
    counters: TierCounters
    kept_bytes: int = 0
    """Charged slots of blocks that are kept from eviction (pinned by users)."""
    keep_limit_bytes: int = 0
    capacity_bytes: int = 0
    """Of the quota, what whole slabs can have; the watermarks are shares of it."""
