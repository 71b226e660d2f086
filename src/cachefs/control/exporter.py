"""Render all metrics in the text format of Prometheus, from the counters of the mount's parts."""

import resource
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cachefs import __version__
from cachefs.cache.counters import TierStatus
from cachefs.config import OFF
from cachefs.control.mount_state import MountState
from cachefs.metrics import BOUNDS_S, METRICS, OF_SHARED, OF_WRITES, Metric
from cachefs.origin.writable import WriteCounters
from cachefs.shared.tier import SharedTier
from cachefs.writes.unsent.report import UnsentFiles, UnsentState

_USERS = 200
"""The first users have their own series, up to this number. All others share the series "other"."""

_STATES = ("normal", "unstable", "down")

(_REQUESTS,) = (metric for metric in METRICS if metric.kind == "histogram")

_BUCKETS = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]

Values = dict[str, list[tuple[tuple[str, ...], float]]]
"""By metric name: pairs of label values and value."""

_TIER_VALUES: dict[str, Callable[[TierStatus], float]] = {
    "cachefs_tier_quota_bytes": lambda tier: tier.quota_bytes,
    "cachefs_tier_high_bytes": lambda tier: tier.high_bytes,
    "cachefs_tier_low_bytes": lambda tier: tier.low_bytes,
    "cachefs_tier_used_bytes": lambda tier: tier.used_bytes,
    "cachefs_tier_cached_bytes": lambda tier: tier.cached_bytes,
    "cachefs_tier_cached_blocks": lambda tier: tier.cached_blocks,
    "cachefs_tier_pinned_bytes": lambda tier: tier.pinned_bytes,
    "cachefs_tier_disk_bytes": lambda tier: tier.disk_bytes,
    "cachefs_tier_hits_total": lambda tier: tier.counters.hits,
    "cachefs_tier_hit_bytes_total": lambda tier: tier.counters.hit_bytes,
    "cachefs_tier_admitted_blocks_total": lambda tier: tier.counters.admitted,
    "cachefs_tier_admitted_bytes_total": lambda tier: tier.counters.admitted_bytes,
    "cachefs_tier_rejected_blocks_total": lambda tier: tier.counters.rejected,
    "cachefs_tier_evicted_blocks_total": lambda tier: tier.counters.evicted,
    "cachefs_tier_demoted_blocks_total": lambda tier: tier.counters.demoted,
    "cachefs_tier_promoted_blocks_total": lambda tier: tier.counters.promoted,
    "cachefs_tier_adopted_blocks_total": lambda tier: tier.counters.adopted,
    "cachefs_tier_verified_blocks_total": lambda tier: tier.counters.verified,
    "cachefs_tier_bad_blocks_total": lambda tier: tier.counters.bad_blocks,
    "cachefs_tier_bad_slabs_total": lambda tier: tier.counters.bad_slabs,
    "cachefs_tier_bad_indexes_total": lambda tier: tier.counters.bad_index,
    "cachefs_tier_bad_rows_total": lambda tier: tier.counters.bad_rows,
    "cachefs_tier_reassigned_slabs_total": lambda tier: tier.counters.reassigned,
    "cachefs_tier_read_errors_total": lambda tier: tier.counters.read_errors,
    "cachefs_tier_write_errors_total": lambda tier: tier.counters.write_errors,
}


class Exporter:
    """Renders the metrics of one mount. Each scrape takes a few milliseconds on the loop."""

    def __init__(self, state: MountState) -> None:
        self._state = state
        self._collector = _MountCollector(state)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type. The type is one that `accept` (the value of the
        HTTP header) allows."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def figures(self) -> dict[str, list[list[Any]]]:
        """Return the same values for JSON: by metric name, pairs of the values of the labels and
        the value. That of a histogram is an object: `cumulated`, the number of requests that took
        no longer than each of `BOUNDS_S`, then of all requests; and `sum`, their seconds."""
        figures: dict[str, list[list[Any]]] = {}
        for metric, values in self._collector.values():
            figures[metric.name] = [[labels, value] for labels, value in values]
        histograms = sorted(self._state.requests.histograms().items())
        figures[_REQUESTS.name] = [
            [labels, {"cumulated": histogram.cumulated(), "sum": histogram.sum_ns / 1e9}]
            for labels, histogram in histograms
        ]
        return figures


class _MountCollector(Collector):
    def __init__(self, state: MountState) -> None:
        self._state = state

    def collect(self) -> Iterable[Family]:
        plain = list(self.values())
        yield self._requests(_REQUESTS)
        for metric, values in plain:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=metric.labels)
            for labels, value in values:
                family.add_metric(labels, value)
            yield family

    def values(self) -> Iterator[tuple[Metric, Sequence[tuple[tuple[str, ...], float]]]]:
        """Yield the values of each metric except the histogram, after an update of the relay's."""
        if self._state.relay is not None:
            self._state.relay.update()
        values = _values(self._state)
        absent = set() if self._state.unsent is not None else set(OF_WRITES)
        if self._state.cache.shared.members.option == OFF:
            absent |= OF_SHARED
        for metric in METRICS:
            if metric.name not in absent and metric is not _REQUESTS:
                yield metric, values[metric.name]

    def describe(self) -> Iterator[Family]:
        return iter(())

    def _requests(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
        for labels, histogram in sorted(self._state.requests.histograms().items()):
            buckets = list(zip(_BUCKETS, histogram.cumulated(), strict=True))
            family.add_metric(labels, buckets, histogram.sum_ns / 1e9)
        return family


def _values(state: MountState) -> Values:
    values: Values = defaultdict(list)
    for name, value in _plain_values(state):
        values[name].append(((), value))
    for tier in state.cache.status():
        labels = (tier.path, tier.medium.value)
        for name, read in _TIER_VALUES.items():
            values[name].append((labels, read(tier)))
        for health in _STATES:
            found = ((*labels, health), float(tier.health == health))
            values["cachefs_tier_health"].append(found)
    values |= _values_of_shared(state.cache.shared)
    origin = state.origin.counters
    sent = {"get": origin.gets, "head": origin.heads, "list": origin.lists}
    values["cachefs_origin_requests_total"] = [((kind,), n) for kind, n in sent.items()]
    if state.unsent is not None:
        values |= _values_of_writes(state.unsent, origin.writes)
    for uid, read_bytes, stalled_s in _users(state):
        values["cachefs_user_read_bytes_total"].append(((uid,), read_bytes))
        values["cachefs_user_stalled_seconds_total"].append(((uid,), stalled_s))
    config = state.config
    about = (__version__, state.origin.url, str(config.mountpoint), config.cache_eviction)
    values["cachefs_info"] = [(about, 1)]
    return values


def _values_of_writes(unsent: UnsentFiles, counters: WriteCounters) -> Values:
    counts, space = unsent.counts(), unsent.spool.space
    sent = {
        "put": counters.puts,
        "part": counters.parts,
        "copy": counters.copies,
        "delete": counters.deletes,
        "upload": counters.uploads,
    }
    return {
        "cachefs_origin_write_requests_total": [((kind,), n) for kind, n in sent.items()],
        "cachefs_origin_sent_bytes_total": [((), counters.sent_bytes)],
        "cachefs_origin_write_errors_total": [((), counters.errors)],
        "cachefs_unsent_files": [((s.value,), counts.files[s]) for s in UnsentState],
        "cachefs_unsent_bytes": [((s.value,), counts.size_bytes[s]) for s in UnsentState],
        "cachefs_spool_used_bytes": [((), space.used_bytes)],
        "cachefs_spool_limit_bytes": [((), space.limit_bytes)],
    }


def _values_of_shared(shared: SharedTier) -> Values:
    members, counters = list(shared.members), shared.counters
    out, totals = sum(member.is_out for member in members), shared.members.totals()
    values = {
        "cachefs_shared_on": float(shared.is_on),
        "cachefs_shared_kept_ratio": shared.demand.share,
        "cachefs_shared_hits_total": counters.hits,
        "cachefs_shared_misses_total": counters.misses,
        "cachefs_shared_waits_total": counters.waited,
        "cachefs_shared_bypasses_total": counters.bypasses,
        "cachefs_shared_hit_bytes_total": counters.hit_bytes,
        "cachefs_shared_dropped_blocks_total": shared.dropped_blocks,
        "cachefs_shared_stored_blocks_total": totals.stored_blocks,
        "cachefs_shared_stored_bytes_total": totals.stored_bytes,
        "cachefs_shared_bad_values_total": totals.bad_values,
        "cachefs_shared_failures_total": totals.failures,
        "cachefs_shared_latency_seconds": max(
            (m.latencies.p50_s or 0.0 for m in members), default=0.0
        ),
    }
    by_state = [(("in",), len(members) - out), (("out",), out)]
    return {
        **{name: [((), value)] for name, value in values.items()},
        "cachefs_shared_members": [(labels, float(count)) for labels, count in by_state],
    }


def _plain_values(state: MountState) -> Iterator[tuple[str, float]]:
    """Yield the metrics without labels."""
    yield "cachefs_fuse_requests_waiting", state.requests.waiting
    relay = {} if state.relay is None else state.relay.report()
    yield "cachefs_relay_hits_total", relay.get("hits", 0)
    yield "cachefs_relay_forwarded_total", relay.get("forwarded", 0)
    yield "cachefs_relay_opens_total", relay.get("opens", 0)
    yield "cachefs_relay_opens_passed_through_total", relay.get("opens_through", 0)
    cache = state.cache.counters
    yield "cachefs_cache_hits_total", cache.hits
    yield "cachefs_cache_misses_total", cache.misses
    yield "cachefs_cache_hit_bytes_total", cache.hit_bytes
    yield "cachefs_cache_fetches_total", cache.fetches
    yield "cachefs_cache_fetch_errors_total", cache.fetch_errors
    yield "cachefs_cache_fetched_bytes_total", cache.fetched_bytes
    yield "cachefs_cache_readers_waiting", state.cache.waiting_readers
    yield "cachefs_cache_blocks_fetching", state.cache.fetching_count
    yield "cachefs_cache_blocks_storing", state.cache.storing_count
    yield "cachefs_cache_buffer_bytes", state.cache.held_bytes
    yield "cachefs_load_jobs", state.jobs.running_count
    origin = state.origin.counters
    yield "cachefs_origin_received_bytes_total", origin.get_bytes
    yield "cachefs_origin_errors_total", origin.errors
    yield "cachefs_origin_skipped_keys_total", origin.unshown_keys
    health = state.origin.state()
    yield "cachefs_origin_retries_total", health["retries"]
    yield "cachefs_origin_busy_answers_total", health["busy_answers"]
    yield "cachefs_origin_failed_calls_total", health["failed_calls"]
    yield "cachefs_origin_hedges_total", health["hedges"]
    yield "cachefs_origin_breaker_open", state.origin.is_down
    yield "cachefs_origin_requests_in_flight", health["in_flight"]
    yield "cachefs_origin_requests_queued", health["queued"]
    yield "cachefs_origin_request_limit", health["limit"]
    stale = state.namespace.outage.state
    yield "cachefs_namespace_bad_rows_total", state.namespace.table.bad_rows
    yield "cachefs_stale", stale.is_stale
    yield "cachefs_stale_answers_total", stale.answer_count
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield "process_start_time_seconds", state.started_at
    yield "process_cpu_seconds_total", usage.ru_utime + usage.ru_stime
    yield "process_resident_memory_bytes", _resident_bytes()


def _users(state: MountState) -> Iterator[tuple[str, float, float]]:
    """Yield uid (or "other"), read bytes and stalled seconds of each user with any."""
    other_bytes = other_ns = 0
    for count, usage in enumerate(state.limits.usage()):
        if not usage.read_bytes and not usage.stalled_ns:
            continue
        if usage.uid is not None and count <= _USERS:
            yield str(usage.uid), usage.read_bytes, usage.stalled_ns / 1e9
        else:
            other_bytes += usage.read_bytes
            other_ns += usage.stalled_ns
    if other_bytes or other_ns:
        yield "other", other_bytes, other_ns / 1e9


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
