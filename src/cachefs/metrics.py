"""All metrics with their names, types, labels and meanings, and the histograms of the requests.

`control/exporter.py` fills in the values; docs/METRICS.md lists the metrics (a test compares).
"""

from typing import Literal, NamedTuple

from cachefs.last_errors import LastErrors

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
        "Time to answer a request of the kernel. Outcomes are ok, absent (there is "
        "no such name) and error. Those of reads are hit (answered at once), wait "
        "(for a disk, the origin or a limit) and error.",
    ),
    _gauge("fuse_requests_waiting", "Requests of the kernel that are being answered."),
    _counter(
        "user_read_bytes",
        "Bytes given to the readers of a user. Bytes from the kernel's page cache do not count.",
        "uid",
    ),
    _counter(
        "user_stalled_seconds",
        "Time for which READs of a user waited for a disk, the origin or a limit. "
        "The times of READs that wait at once are added.",
        "uid",
    ),
    _counter("relay_hits", "READs of the kernel that the relay answered, without the daemon."),
    _counter("relay_forwarded", "Requests of the kernel that the relay gave to the daemon."),
    _counter("relay_opens", "Files that were opened, with `--passthrough auto`."),
    _counter(
        "relay_opens_passed_through",
        "Files of these that the kernel reads directly from the cache disk.",
    ),
    _counter("cache_hits", "Blocks read from the cache."),
    _counter("cache_misses", "Blocks for which readers had to wait for the origin."),
    _counter("cache_hit_bytes", "Bytes read from the cache."),
    _counter("cache_fetches", "GETs for blocks, including those of read-ahead."),
    _counter("cache_fetch_errors", "GETs for blocks that returned nothing."),
    _counter("cache_fetched_bytes", "Bytes that GETs for blocks returned."),
    _gauge("cache_readers_waiting", "Reads that wait for blocks from the origin."),
    _gauge(
        "cache_blocks_fetching",
        "Blocks that the GETs in flight, and those that wait for a slot, will fetch.",
    ),
    _gauge("cache_blocks_storing", "Blocks that were fetched and wait to be stored in a tier."),
    _gauge(
        "cache_buffer_bytes",
        "Memory for blocks on their way from the origin. --buffer-size limits it.",
    ),
    _gauge("load_jobs", "Load jobs that are queued or running."),
    _gauge("tier_quota_bytes", "The most bytes that a tier may use.", *_TIER),
    _gauge("tier_high_bytes", "The high watermark: eviction begins when a tier uses more.", *_TIER),
    _gauge("tier_low_bytes", "The low watermark: eviction ends when a tier uses less.", *_TIER),
    _gauge(
        "tier_used_bytes",
        "Bytes of slots in use. Eviction compares them with the watermarks.",
        *_TIER,
    ),
    _gauge("tier_cached_bytes", "Bytes of blocks in a tier.", *_TIER),
    _gauge("tier_cached_blocks", "Blocks in a tier.", *_TIER),
    _gauge("tier_pinned_bytes", "Bytes of slots whose blocks are pinned.", *_TIER),
    _gauge("tier_disk_bytes", "Bytes that the slabs of a tier occupy on its disk.", *_TIER),
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
    _counter(
        "tier_rejected_blocks",
        "Blocks that were served but not stored, because there was no room or the "
        "policy refused them.",
        *_TIER,
    ),
    _counter("tier_evicted_blocks", "Blocks that were evicted to make room.", *_TIER),
    _counter(
        "tier_demoted_blocks", "Blocks that were moved to a slower tier to make room.", *_TIER
    ),
    _counter("tier_promoted_blocks", "Blocks that came from a slower tier.", *_TIER),
    _counter("tier_adopted_blocks", "Blocks that a slab contained and the index had lost.", *_TIER),
    _counter(
        "tier_verified_blocks",
        "Blocks that were verified as a whole: at the first read after a start, by "
        "the scrubber, or at every read with `--verify full`.",
        *_TIER,
    ),
    _counter(
        "tier_bad_blocks",
        "Blocks whose bytes were not the stored ones. They were fetched again.",
        *_TIER,
    ),
    _counter("tier_bad_slabs", "Slabs that were missing or did not belong to the tier.", *_TIER),
    _counter("tier_bad_indexes", "Indexes that could not be used. They were rebuilt.", *_TIER),
    _counter(
        "tier_bad_rows",
        "Rows of the index whose checksum was wrong. Their blocks were fetched again.",
        *_TIER,
    ),
    _counter("tier_reassigned_slabs", "Slabs that were given to another size class.", *_TIER),
    _counter("tier_read_errors", "Reads of the disk that failed.", *_TIER),
    _counter("tier_write_errors", "Writes to the disk that failed.", *_TIER),
    _gauge(
        "shared_on",
        "1 while the daemon asks the shared tier for blocks, 0 while it bypasses the shared tier.",
    ),
    _gauge("shared_members", "Members of the shared tier: in or out.", "state"),
    _gauge("shared_kept_ratio", "Share of all blocks that the shared tier keeps."),
    _counter("shared_hits", "Blocks that came from the shared tier."),
    _counter("shared_misses", "Blocks that the shared tier did not have."),
    _counter("shared_waits", "Blocks that another node was fetching when this one asked."),
    _counter(
        "shared_bypasses",
        "Times when the daemon bypassed the shared tier, because it was slower than the origin.",
    ),
    _counter("shared_hit_bytes", "Bytes that came from the shared tier."),
    _counter(
        "shared_dropped_blocks",
        "Blocks that were not stored in the shared tier: too many waited, or a "
        "member refused them.",
    ),
    _counter("shared_stored_blocks", "Blocks that this node has stored in the shared tier."),
    _counter("shared_stored_bytes", "Bytes that this node has stored in the shared tier."),
    _counter(
        "shared_bad_values", "Values of the shared tier with a wrong proof. They were not used."
    ),
    _counter(
        "shared_failures", "Requests to a member of the shared tier that failed or came too late."
    ),
    _gauge(
        "shared_latency_seconds", "Median time until the slowest member of the shared tier answers."
    ),
    _counter("origin_requests", "Requests sent to the origin: get, head or list.", "kind"),
    _counter("origin_received_bytes", "Bytes of objects that the origin sent."),
    _counter("origin_errors", "Requests to the origin that failed."),
    _counter("origin_skipped_keys", "Keys in listings that can't be shown as names."),
    _counter("origin_retries", "Requests sent again after a failure."),
    _counter("origin_busy_answers", "Answers of the origin that said that it has too much to do."),
    _counter(
        "origin_failed_calls",
        "Calls that failed after all tries, or at once while the origin was down.",
    ),
    _counter("origin_hedges", "Second requests for a block whose first request was slow."),
    _counter(
        "origin_write_requests",
        "Requests of writes that were sent to the origin: put, part, copy, delete "
        "or upload. An upload request begins, lists, completes or aborts an upload "
        "in parts.",
        "kind",
    ),
    _counter("origin_sent_bytes", "Bytes of objects and parts that the origin has acknowledged."),
    _counter("origin_write_errors", "Requests of writes to the origin that failed."),
    _gauge(
        "unsent_files",
        "Unsent files, by state: open, waiting, sending, failed, conflict or held.",
        "state",
    ),
    _gauge("unsent_bytes", "Sizes of the unsent files, by state.", "state"),
    _gauge("spool_used_bytes", "Bytes that unsent files use in the spool."),
    _gauge("spool_limit_bytes", "Bytes that unsent files may use in the spool (--spool-size)."),
    _gauge(
        "origin_breaker_open", "1 while the origin counts as down and calls fail at once, else 0."
    ),
    _gauge("origin_requests_in_flight", "Requests to the origin that are in flight."),
    _gauge("origin_requests_queued", "Requests to the origin that wait for a slot."),
    _gauge(
        "origin_request_limit",
        "Requests to the origin that may be in flight now. It is lower after busy answers.",
    ),
    _counter(
        "namespace_bad_rows",
        "Rows of the namespace that were damaged or lost. The origin was asked again.",
    ),
    _gauge(
        "stale",
        "1 while the mount shows names and attributes that the origin can't confirm, else 0.",
    ),
    _counter(
        "stale_answers",
        "Names and attributes that were shown although the origin could not confirm them.",
    ),
    _gauge(
        "info", "1. The labels say what is mounted.", "version", "source", "mountpoint", "policy"
    ),
    Metric(
        "process_start_time_seconds",
        "gauge",
        (),
        "When the mount began, in seconds since the epoch.",
    ),
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
        self.last_errors = LastErrors()
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
