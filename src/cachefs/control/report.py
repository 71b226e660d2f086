"""The status of one mount, as the control socket carries it."""

from collections.abc import Mapping
from typing import Any, TypedDict

from cachefs.cache.counters import TierStatus
from cachefs.origin.resilience import OriginHealth
from cachefs.types import DataPath


class CacheStatus(TypedDict):
    """What is held, over all cache directories."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    dirs: list[str]


class TierReport(TypedDict):
    """One cache directory. What its fields mean stands in `cache.counters`."""

    path: str
    medium: str
    health: str
    quota_bytes: int
    capacity_bytes: int
    disk_bytes: int
    used_bytes: int
    high_bytes: int
    low_bytes: int
    cached_bytes: int
    cached_blocks: int
    pinned_bytes: int
    pin_limit_bytes: int
    hits: int
    hit_bytes: int
    admitted: int
    rejected: int
    evicted: int
    demoted: int
    promoted: int
    adopted: int
    verified: int
    bad_blocks: int
    bad_slabs: int
    read_errors: int
    write_errors: int


class ReadStatus(TypedDict):
    """Blocks asked for since the start: answered from the cache, or by the origin."""

    hits: int
    misses: int
    hit_bytes: int
    fetched_bytes: int


class OriginStatus(TypedDict):
    """Requests that the origin was sent since the start."""

    gets: int
    heads: int
    lists: int
    get_bytes: int
    errors: int


class DataPathStatus(TypedDict):
    """See `types.DataPath`."""

    name: str
    reason: str | None
    restarts: int
    restarted_at: float | None
    last_end: str | None


class RelayStatus(TypedDict):
    """What the relay has done since the mount began: READs answered (`hits`), of these after a wait
    for a disk (`waited`); requests given to the daemon (`forwarded`), of these READs (`missed`), of
    these after too long a wait (`late`), or because the block had to go meanwhile (`changed`)."""

    hits: int
    hit_bytes: int
    waited: int
    forwarded: int
    missed: int
    late: int
    changed: int


class StatusReport(TypedDict):
    """`pid` is the daemon's, which on the relay's data path has a supervisor. `mounted` once it has
    answered the kernel. `started_at` is seconds since the epoch; `policy` decides what is evicted;
    `metrics` is the address where they are served; `tiers` are sorted by medium, the fastest first.
    `stale` while the origin does not answer and what was last known is shown instead, since
    `stale_since` (seconds since the epoch). `unshown_keys` is how many keys of the directories that
    were listed since the start can't be shown as names."""

    mountpoint: str
    source: str
    pid: int
    supervisor_pid: int | None
    data_path: DataPathStatus
    relay: RelayStatus | None
    mounted: bool
    started_at: float
    version: str
    policy: str
    metrics: str | None
    stale: bool
    stale_since: float | None
    unshown_keys: int
    cache: CacheStatus
    tiers: list[TierReport]
    reads: ReadStatus
    origin: OriginStatus
    origin_health: OriginHealth
    limits: dict[str, Any]


def relay_report(counters: Mapping[str, int]) -> RelayStatus:
    """For JSON."""
    return {
        "hits": counters["hits"],
        "hit_bytes": counters["hit_bytes"],
        "waited": counters["waited"],
        "forwarded": counters["forwarded"],
        "missed": counters["missed"],
        "late": counters["late"],
        "changed": counters["changed"],
    }


def data_path_report(path: DataPath) -> DataPathStatus:
    """For JSON."""
    return {
        "name": path.name.value,
        "reason": path.reason,
        "restarts": path.restarts,
        "restarted_at": path.restarted_at,
        "last_end": path.last_end,
    }


def cache_report(tiers: list[TierStatus]) -> CacheStatus:
    """The sum over all tiers."""
    return {
        "capacity_bytes": sum(tier.quota_bytes for tier in tiers),
        "used_bytes": sum(tier.cached_bytes for tier in tiers),
        "blocks": sum(tier.cached_blocks for tier in tiers),
        "dirs": [tier.path for tier in tiers],
    }


def tier_report(tier: TierStatus) -> TierReport:
    """One tier, for JSON."""
    counters = tier.counters
    return {
        "path": tier.path,
        "medium": tier.medium.value,
        "health": tier.health,
        "quota_bytes": tier.quota_bytes,
        "capacity_bytes": tier.capacity_bytes,
        "disk_bytes": tier.disk_bytes,
        "used_bytes": tier.used_bytes,
        "high_bytes": tier.high_bytes,
        "low_bytes": tier.low_bytes,
        "cached_bytes": tier.cached_bytes,
        "cached_blocks": tier.cached_blocks,
        "pinned_bytes": tier.kept_bytes,
        "pin_limit_bytes": tier.keep_limit_bytes,
        "hits": counters.hits,
        "hit_bytes": counters.hit_bytes,
        "admitted": counters.admitted,
        "rejected": counters.rejected,
        "evicted": counters.evicted,
        "demoted": counters.demoted,
        "promoted": counters.promoted,
        "adopted": counters.adopted,
        "verified": counters.verified,
        "bad_blocks": counters.bad_blocks,
        "bad_slabs": counters.bad_slabs,
        "read_errors": counters.read_errors,
        "write_errors": counters.write_errors,
    }
