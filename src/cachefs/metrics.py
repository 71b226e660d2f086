"""All metrics with their names, types, labels and meanings, and the histograms of the requests.

`control/exporter.py` fills in the values; docs/METRICS.md lists the metrics (a test compares).
"""

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """The description of a metric. Names follow the conventions of Prometheus; seconds and bytes
    are the only units."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"cachefs_{name}_total", "counter", labels, text)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"cachefs_{name}", "gauge", labels, text)


_TIER = ("path", "medium")

METRICS = (
    Metric(
        "cachefs_fuse_request_seconds",
        "histogram",
        ("operation", "outcome"),
        "Time to answer a request of the kernel. Outcomes: ok; absent (no such name); error; for "
        "read hit (answered at once), wait (for a disk, the origin or a limit) and error.",
    ),
    _gauge("fuse_requests_waiting", "Requests of the kernel that are being answered."),
    _counter(
        "user_read_bytes",
        "Bytes given to the readers of a user; not those that the kernel had in its page cache.",
        "uid",
    ),
    _counter(
        "user_stalled_seconds",
        "Time for which READs of a user waited for a disk, the origin or a limit; several may "
        "wait at once.",
        "uid",
    ),
    _counter("relay_hits", "READs of the kernel that the relay answered, without the daemon."),
    _counter("relay_forwarded", "Requests of the kernel that the relay gave to the daemon."),
    _counter("cache_hits", "Blocks read from the cache."),
    _counter("cache_misses", "Blocks that readers had to wait for the origin for."),
    _counter("cache_hit_bytes", "Bytes read from the cache."),
    _counter("cache_fetches", "GETs for blocks, reading ahead included."),
    _counter("cache_fetch_errors", "GETs for blocks that brought nothing."),
    _counter("cache_fetched_bytes", "Bytes that came with GETs for blocks."),
    _gauge("cache_readers_waiting", "Reads that wait for blocks from the origin."),
    _gauge("cache_blocks_fetching", "Blocks that GETs under way, or queued, are to bring."),
    _gauge("cache_blocks_storing", "Blocks that have come and wait to be stored in a tier."),
    _gauge("cache_buffer_bytes", "Memory for blocks on their way; --buffer-size bounds it."),
    _gauge("load_jobs", "Load jobs that are queued or at work."),
    _gauge("tier_quota_bytes", "What a tier may hold.", *_TIER),
    _gauge("tier_high_bytes", "Above it, what the policy lets go is evicted.", *_TIER),
    _gauge("tier_low_bytes", "Eviction ends below it.", *_TIER),
    _gauge("tier_used_bytes", "Slots in use: what the watermarks look at.", *_TIER),
    _gauge("tier_cached_bytes", "Bytes of blocks in a tier.", *_TIER),
    _gauge("tier_cached_blocks", "Blocks in a tier.", *_TIER),
    _gauge("tier_pinned_bytes", "Slots of blocks that are kept from eviction.", *_TIER),
    _gauge("tier_disk_bytes", "What the slabs of a tier occupy on its disk.", *_TIER),
    _gauge(
        "tier_health",
        "1 for the state that a tier is in: normal, unstable or down.",
        *_TIER,
        "state",
    ),
    _counter("tier_hits", "Reads answered by a tier.", *_TIER),
    _counter("tier_hit_bytes", "Bytes read from a tier.", *_TIER),
    _counter("tier_admitted_blocks", "Blocks stored in a tier.", *_TIER),
    _counter("tier_admitted_bytes", "Bytes stored in a tier.", *_TIER),
    _counter("tier_rejected_blocks", "Blocks served and not kept: no room, or the policy.", *_TIER),
    _counter("tier_evicted_blocks", "Blocks dropped to make room.", *_TIER),
    _counter("tier_demoted_blocks", "Blocks moved to a slower tier to make room.", *_TIER),
    _counter("tier_promoted_blocks", "Blocks that came from a slower tier.", *_TIER),
    _counter("tier_adopted_blocks", "Blocks that the index had lost and a slab knew.", *_TIER),
    _counter(
        "tier_verified_blocks",
        "Blocks that were compared as a whole: at the first read after a start, by the scrubber, "
        "or at every read with `--verify full`.",
        *_TIER,
    ),
    _counter("tier_bad_blocks", "Blocks that were not what was stored; fetched again.", *_TIER),
    _counter("tier_bad_slabs", "Slabs that were missing or foreign.", *_TIER),
    _counter("tier_bad_indexes", "Indexes that could not be used and were rebuilt.", *_TIER),
    _counter("tier_reassigned_slabs", "Slabs given to another size class.", *_TIER),
    _counter("tier_read_errors", "Reads of the disk that failed.", *_TIER),
    _counter("tier_write_errors", "Writes to the disk that failed.", *_TIER),
    _gauge("shared_on", "1 while blocks are asked for in the shared tier, 0 while all bypass it."),
    _gauge("shared_members", "Members of the shared tier: in or out.", "state"),
    _gauge("shared_kept_ratio", "Share of the blocks that the shared tier keeps."),
    _counter("shared_hits", "Blocks that came from the shared tier."),
    _counter("shared_misses", "Blocks that the shared tier did not have."),
    _counter("shared_waits", "Blocks that another node was fetching when this one asked."),
    _counter("shared_bypasses", "Times when it was bypassed, as it was slower than the origin."),
    _counter("shared_hit_bytes", "Bytes that came from the shared tier."),
    _counter("shared_dropped_blocks", "Blocks that were not stored there: too many, or refused."),
    _counter("shared_stored_blocks", "Blocks that this node has stored there."),
    _counter("shared_stored_bytes", "Bytes that this node has stored there."),
    _counter("shared_bad_values", "Values with a wrong proof; they were not used."),
    _counter("shared_failures", "Requests to a member that failed or came too late."),
    _gauge("shared_latency_seconds", "Median time until the slowest member answers."),
    _counter("origin_requests", "Requests sent to the origin: get, head or list.", "kind"),
    _counter("origin_received_bytes", "Bytes of objects that the origin sent."),
    _counter("origin_errors", "Requests to the origin that failed."),
    _counter("origin_skipped_keys", "Keys in listings that can't be shown as names."),
    _counter("origin_retries", "Requests sent again after a failure."),
    _counter("origin_busy_answers", "Answers that said that the origin has too much to do."),
    _counter("origin_failed_calls", "Calls given up after all tries, or at once while it is down."),
    _counter("origin_hedges", "Second requests for a block whose first was slow."),
    _counter(
        "origin_write_requests",
        "Requests of writes sent to the origin: put, part, copy, delete, or upload (begins, lists, "
        "completes or aborts one in parts).",
        "kind",
    ),
    _counter("origin_sent_bytes", "Bytes of objects and parts that the origin has acknowledged."),
    _counter("origin_write_errors", "Requests of writes that failed."),
    _gauge(
        "unsent_files",
        "Files that the origin does not have as they were written: open, waiting, sending, failed, "
        "conflict or held.",
        "state",
    ),
    _gauge("unsent_bytes", "Their sizes.", "state"),
    _gauge("spool_used_bytes", "What unsent files take in the spool."),
    _gauge("spool_limit_bytes", "What they may take; --spool-size."),
    _gauge("origin_breaker_open", "1 while the origin counts as down, so that calls fail at once."),
    _gauge("origin_requests_in_flight", "Requests to the origin that are under way."),
    _gauge("origin_requests_queued", "Requests to the origin that wait for a slot."),
    _gauge("origin_request_limit", "Requests that may be under way now; less after busy answers."),
    _gauge("stale", "1 while names and attributes are shown that the origin can't confirm."),
    _counter("stale_answers", "Names and attributes shown that the origin could not confirm."),
    _gauge(
        "info", "1; the labels say what is mounted.", "version", "source", "mountpoint", "policy"
    ),
    Metric("process_start_time_seconds", "gauge", (), "When the mount began, since the epoch."),
    Metric("process_cpu_seconds_total", "counter", (), "CPU time of the daemon."),
    Metric("process_resident_memory_bytes", "gauge", (), "Resident memory of the daemon."),
)
"""All exported metrics, in the order of export."""

OF_WRITES = frozenset(
    {
        "cachefs_origin_write_requests_total",
        "cachefs_origin_sent_bytes_total",
        "cachefs_origin_write_errors_total",
        "cachefs_unsent_files",
        "cachefs_unsent_bytes",
        "cachefs_spool_used_bytes",
        "cachefs_spool_limit_bytes",
    }
)
"""The metrics that only writable mounts export."""

OF_SHARED = frozenset(
    metric.name for metric in METRICS if metric.name.startswith("cachefs_shared_")
)
"""The metrics that only mounts with a shared tier export."""

_SHIFT = 13
_BUCKETS = 22
BOUNDS_S = tuple((1 << _SHIFT + power) / 1e9 for power in range(_BUCKETS))
"""Upper bounds of the buckets: from 8.192 us, doubling, up to 17.2 s."""


class Histogram:
    """A histogram of durations. One `note` costs about 0.2 us: a shift and two additions."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * 64
        """The number of durations by `(ns >> 13).bit_length()`."""
        self.sum_ns = 0

    def note(self, ns: int) -> None:
        """Count a duration of `ns` nanoseconds, which must be >= 0."""
        self.counts[(ns >> _SHIFT).bit_length()] += 1
        self.sum_ns += ns

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulated(self) -> list[int]:
        """Return how many durations were within each of `BOUNDS_S`, then their total number."""
        total, sums = 0, []
        for count in self.counts[:_BUCKETS]:
            total += count
            sums.append(total)
        return [*sums, self.count]


class Requests:
    """Statistics of the kernel's requests. Only the loop thread uses it."""

    def __init__(self) -> None:
        self.waiting = 0
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def histogram(self, operation: str, outcome: str) -> Histogram:
        """Return the histogram for this operation and outcome, the same object each time."""
        key = operation, outcome
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram()
        return found

    def histograms(self) -> dict[tuple[str, str], Histogram]:
        """Return all histograms by operation and outcome."""
        return dict(self._histograms)
