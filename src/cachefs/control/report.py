"""The status of one mount, in the form that the control socket sends."""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from cachefs.cache.counters import TierStatus
from cachefs.last_errors import LastError
from cachefs.origin.resilience import OriginState
from cachefs.origin.writable import WriteCounters
from cachefs.shared.tier import SharedTier
from cachefs.types import DataPath
from cachefs.writes.unsent.report import UnsentFiles, UnsentState


class CacheStatus(TypedDict):
    """The sums over all cache directories."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    dirs: list[str]


class TierReport(TypedDict):
    """One cache directory. `cache.counters` explains the fields."""

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
    """Requested blocks since the start: from the cache (hits), or from the origin (misses)."""

    hits: int
    misses: int
    hit_bytes: int
    fetched_bytes: int


class OriginStatus(TypedDict):
    """Requests sent to the origin since the start."""

    gets: int
    heads: int
    lists: int
    get_bytes: int
    errors: int


class WritesStatus(TypedDict):
    """What was written to a mount: the unsent files by state
    (`writes.unsent.report.UnsentState`), the spool, and the requests of writes sent to the origin
    since the start (`origin.writable.WriteCounters`)."""

    unsent_files: int
    unsent_bytes: int
    states: dict[str, int]
    spool: str
    spool_bytes: int
    spool_limit_bytes: int
    puts: int
    parts: int
    copies: int
    deletes: int
    uploads: int
    sent_bytes: int
    errors: int


class SharedMemberReport(TypedDict):
    """One member of the shared tier. `shared.member` explains the fields."""

    address: str
    state: Literal["in", "out"]
    share: float
    hits: int
    misses: int
    hit_bytes: int
    stored_blocks: int
    stored_bytes: int
    failures: int
    bad_values: int
    latency_s: float | None
    latency_p95_s: float | None
    problem: str | None


SharedReport = TypedDict(
    "SharedReport",
    {
        "from": str,
        "state": Literal["in use", "bypassed", "no members", "off"],
        "problem": str | None,
        "size_bytes": int,
        "share_kept": float,
        "hits": int,
        "misses": int,
        "hit_bytes": int,
        "waited": int,
        "bypasses": int,
        "stored_blocks": int,
        "stored_bytes": int,
        "dropped_blocks": int,
        "bad_values": int,
        "members": list[SharedMemberReport],
    },
)
"""The shared tier. `from` is the option `--shared`. `share_kept` is the share of the blocks that it
keeps, less than 1 if it is smaller than the data. Counts are in blocks since the start."""


class DataPathStatus(TypedDict):
    """See `types.DataPath`."""

    name: str
    reason: str | None
    restarts: int
    restarted_at: float | None
    last_end: str | None


class RelayStatus(TypedDict):
    """The relay's counts since the mount began.

    `hits` are READs that the relay answered; `waited` are those of them that waited for a disk.
    `forwarded` are requests passed to the daemon; `missed` are the READs among them. Of these,
    `late` waited too long, and `changed` had their block dropped meanwhile.
    """

    hits: int
    hit_bytes: int
    waited: int
    forwarded: int
    missed: int
    late: int
    changed: int


class PassthroughStatus(TypedDict):
    """Whether the kernel reads whole files directly. `obstacle` says why not; None if it may.

    `wanted` is whether the mount was asked for it. The counts are of opened files since the mount
    began: those that the relay has answered, and those of them that were passed through.
    """

    wanted: bool
    opens: int
    passed_through: int
    obstacle: str | None


class StatusReport(TypedDict):
    """The status of a mount.

    `pid` is the daemon's process id; on the relay path the daemon has a supervisor
    (`supervisor_pid`). `mounted`: the daemon has answered the kernel. `started_at` and
    `stale_since` are seconds since the epoch. `policy` is the eviction policy. `metrics` is the
    address of the metrics server. `tiers` are sorted by medium, the fastest first. `stale`: the
    origin doesn't answer, and stale answers have been shown since `stale_since`. `unshown_keys` is
    the number of keys that can't be shown as names, in the directories listed since the start, and
    `unshown_links` how many of them are links that lead out of the source.
    `errors` are the last kinds of errors that programs got, the newest first.
    Only writable mounts have `writes`, and only mounts with a shared tier `shared`.
    """

    mountpoint: str
    source: str
    pid: int
    supervisor_pid: int | None
    data_path: DataPathStatus
    relay: RelayStatus | None
    passthrough: PassthroughStatus
    mounted: bool
    started_at: float
    version: str
    policy: str
    metrics: str | None
    stale: bool
    stale_since: float | None
    unshown_keys: int
    unshown_links: int
    cache: CacheStatus
    tiers: list[TierReport]
    reads: ReadStatus
    origin: OriginStatus
    origin_health: OriginState
    limits: dict[str, Any]
    errors: list[LastError]
    writes: NotRequired[WritesStatus]
    shared: NotRequired[SharedReport]


def relay_report(counters: Mapping[str, int]) -> RelayStatus:
    """Select the relay's counters for JSON."""
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
    """Convert a data path for JSON."""
    return {
        "name": path.name.value,
        "reason": path.reason,
        "restarts": path.restarts,
        "restarted_at": path.restarted_at,
        "last_end": path.last_end,
    }


def writes_report(unsent: UnsentFiles, counters: WriteCounters) -> WritesStatus:
    """Return what the status says of writes."""
    counts, space = unsent.counts(), unsent.spool.space
    return {
        "unsent_files": sum(counts.files.values()),
        "unsent_bytes": sum(counts.size_bytes.values()),
        "states": {state.value: counts.files[state] for state in UnsentState},
        "spool": str(space.root),
        "spool_bytes": space.used_bytes,
        "spool_limit_bytes": space.limit_bytes,
        "puts": counters.puts,
        "parts": counters.parts,
        "copies": counters.copies,
        "deletes": counters.deletes,
        "uploads": counters.uploads,
        "sent_bytes": counters.sent_bytes,
        "errors": counters.errors,
    }


def shared_report(shared: SharedTier) -> SharedReport:
    """Return what the status says of the shared tier."""
    members, counters = list(shared.members), shared.counters
    shares, totals = shared.members.shares(), shared.members.totals()
    state: Literal["in use", "bypassed", "no members"] = "in use"
    if not members:
        state = "no members"
    elif not shared.is_on:
        state = "bypassed"
    return {
        "from": shared.members.option,
        "state": state,
        "problem": shared.problem,
        "size_bytes": shared.demand.limit_bytes,
        "share_kept": shared.demand.share,
        "hits": counters.hits,
        "misses": counters.misses,
        "hit_bytes": counters.hit_bytes,
        "waited": counters.waited,
        "bypasses": counters.bypasses,
        "stored_blocks": totals.stored_blocks,
        "stored_bytes": totals.stored_bytes,
        "dropped_blocks": shared.dropped_blocks,
        "bad_values": totals.bad_values,
        "members": [
            {
                "address": member.address,
                "state": "out" if member.is_out else "in",
                "share": shares.get(member.address, 0.0),
                "hits": member.counters.hits,
                "misses": member.counters.misses,
                "hit_bytes": member.counters.hit_bytes,
                "stored_blocks": member.counters.stored_blocks,
                "stored_bytes": member.counters.stored_bytes,
                "failures": member.counters.failures,
                "bad_values": member.counters.bad_values,
                "latency_s": member.latencies.p50_s,
                "latency_p95_s": member.latencies.p95_s,
                "problem": member.problem,
            }
            for member in members
        ],
    }


def cache_report(tiers: list[TierStatus]) -> CacheStatus:
    """Return the sums over all tiers."""
    return {
        "capacity_bytes": sum(tier.quota_bytes for tier in tiers),
        "used_bytes": sum(tier.cached_bytes for tier in tiers),
        "blocks": sum(tier.cached_blocks for tier in tiers),
        "dirs": [tier.path for tier in tiers],
    }


def tier_report(tier: TierStatus) -> TierReport:
    """Convert the status of one tier for JSON."""
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
        "pinned_bytes": tier.pinned_bytes,
        "pin_limit_bytes": tier.pin_limit_bytes,
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
