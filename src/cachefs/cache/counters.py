"""Counters of the cache since its start, as plain numbers; `metrics` gives them public names."""

from dataclasses import dataclass

from cachefs.types import Medium


@dataclass(slots=True)
class CacheCounters:
    """Counters of a whole mount. A read counts once for each block that it touches."""

    hits: int = 0
    """Reads served from a tier, or from fetched bytes on their way to one."""
    misses: int = 0
    """Reads that waited for the origin: for a fetch of their own or one in flight already."""
    hit_bytes: int = 0
    fetches: int = 0
    """GETs sent to the origin, and files whose bytes came with a look-up or in a joint fetch."""
    fetched_bytes: int = 0
    fetch_errors: int = 0


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier."""

    hits: int = 0
    hit_bytes: int = 0
    admitted: int = 0
    admitted_bytes: int = 0
    rejected: int = 0
    """Blocks that were served but not stored: there was no room, or the policy refused them."""
    evicted: int = 0
    """Blocks dropped from this tier by eviction."""
    demoted: int = 0
    """Blocks moved from this tier to a slower one to make room."""
    promoted: int = 0
    """Blocks moved to this tier from a slower one because they are read often."""
    verified: int = 0
    """Comparisons of a whole block with its checksum, by a read or the scrubber."""
    bad_blocks: int = 0
    """Index rows whose slot did not contain the expected bytes; the block is dropped and fetched
    again."""
    bad_slabs: int = 0
    """Slab files that were missing or had a header of another slab."""
    bad_index: int = 0
    """Unusable indexes that were rebuilt from the slabs."""
    bad_rows: int = 0
    """Rows of the index whose checksum was wrong; they counted as missing."""
    adopted: int = 0
    """Blocks found in a slot table that the index lacked, and added to it."""
    reassigned: int = 0
    """Slabs reassigned to another size class."""
    write_errors: int = 0
    read_errors: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The state of a tier as `cachefs status` shows it."""

    path: str
    medium: Medium
    health: str
    """normal, unstable or down: a value of `Health`."""
    quota_bytes: int
    disk_bytes: int
    used_bytes: int
    """Bytes of charged slots: the watermarks apply to this number."""
    high_bytes: int
    low_bytes: int
    cached_bytes: int
    cached_blocks: int
    counters: TierCounters
    pinned_bytes: int = 0
    """Bytes of charged slots of pinned blocks."""
    pin_limit_bytes: int = 0
    capacity_bytes: int = 0
    """The part of the quota that whole slabs fill; the watermarks are shares of it."""
