"""Compute a mount's rates per second from two samples of its existing counters."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cachefs.control import api
from cachefs.control.client import ask
from cachefs.mounts import socket_path

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon's answers at one moment, and its values in /proc (None if it is not readable)."""

    at_s: float
    """Seconds since the epoch."""
    status: dict[str, Any]
    requests: dict[str, Any]
    cpu_s: float | None = None
    rss_bytes: int | None = None


def take_sample(place: Path, timeout_s: float = TIMEOUT_S) -> Sample:
    """Sample the mount on `place` (a canonical path). Raises `CachefsError`."""
    status = ask(socket_path(place), api.STATUS, None, timeout_s)
    return complete_sample(place, status, timeout_s)


def complete_sample(place: Path, status: dict[str, Any], timeout_s: float = TIMEOUT_S) -> Sample:
    """Sample a mount, given its `status`. Raises `CachefsError`."""
    requests = ask(socket_path(place), api.REQUESTS, None, timeout_s)
    return Sample(time.time(), status, requests, *_process(status["pid"]))


def _process(pid: int) -> tuple[float | None, int | None]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None, None
    ticks = int(fields[11]) + int(fields[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class TierRates:
    """The rates of one cache directory."""

    path: str
    medium: str
    reads_per_s: float
    bytes_per_s: float
    evicted_per_s: float


@dataclass(frozen=True, slots=True)
class UserRates:
    """The rates of one user. `uid` None is the sum of the users without counters of their own."""

    uid: int | None
    bytes_per_s: float
    stalled_share: float
    """Waiting time per time, summed over READs that wait in parallel; may exceed 1."""


@dataclass(frozen=True, slots=True)
class WriteRates:
    """The rates of what a writable mount sends, and what is unsent now."""

    puts_per_s: float
    """Objects and parts."""
    sent_bytes_per_s: float
    errors_per_s: float
    unsent_files: int
    unsent_bytes: int


@dataclass(frozen=True, slots=True)
class SharedRates:
    """The rates of the shared tier, in blocks and bytes that it has given to this node."""

    hits_per_s: float
    bytes_per_s: float
    hit_ratio: float | None
    """Hits per blocks asked for; None without any."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates between two samples. A ratio or time is None without an event to compute it from,
    and an unknown value is None."""

    at: float
    seconds: float
    reads_per_s: float
    read_bytes_per_s: float
    hit_ratio: float | None
    """Hits per blocks requested."""
    read_p50_s: float | None
    read_p99_s: float | None
    lookups_per_s: float
    waiting: int
    origin_gets_per_s: float
    origin_heads_per_s: float
    origin_lists_per_s: float
    origin_bytes_per_s: float
    origin_errors_per_s: float
    evicted_per_s: float
    cpu_ratio: float | None
    """1 means one CPU."""
    rss_bytes: int | None
    tiers: list[TierRates] = field(default_factory=list)
    users: list[UserRates] = field(default_factory=list)
    writes: WriteRates | None = None
    """None for a read-only mount."""
    shared: SharedRates | None = None
    """None without a shared tier."""

    @property
    def origin_requests_per_s(self) -> float:
        """GETs, HEADs and LISTs per second."""
        return self.origin_gets_per_s + self.origin_heads_per_s + self.origin_lists_per_s

    def of_medium(self, medium: str) -> float:
        """Return the bytes per second from all tiers of `medium`."""
        return sum(tier.bytes_per_s for tier in self.tiers if tier.medium == medium)


def rates_between(before: Sample, after: Sample) -> Rates:
    """Return the rates between two samples. If a new daemon has started in between, the rates
    count from its start."""
    was, is_ = before.status, after.status
    if was["pid"] != is_["pid"] or was["started_at"] != is_["started_at"]:
        before = Sample(is_["started_at"], {}, {}, 0.0)
        was = before.status
    seconds = max(1e-3, after.at_s - before.at_s)

    def rate(group: str, name: str) -> float:
        return _less(is_[group], was.get(group, {}), name) / seconds

    tiers = _tier_rates(was.get("tiers", ()), is_["tiers"], seconds)
    reads = _cumulated(before.requests, after.requests, "read")
    lookups = _cumulated(before.requests, after.requests, "lookup")
    hits, misses = rate("reads", "hits"), rate("reads", "misses")
    users = _user_rates(before.requests, after.requests, seconds)
    cpu_s = None if None in (before.cpu_s, after.cpu_s) else after.cpu_s - before.cpu_s  # type: ignore[operator]
    return Rates(
        at=after.at_s,
        seconds=seconds,
        reads_per_s=reads[-1] / seconds,
        read_bytes_per_s=sum(user.bytes_per_s for user in users),
        hit_ratio=hits / (hits + misses) if hits + misses else None,
        read_p50_s=quantile(after.requests["bounds_s"], reads, 0.5),
        read_p99_s=quantile(after.requests["bounds_s"], reads, 0.99),
        lookups_per_s=lookups[-1] / seconds,
        waiting=after.requests["waiting"],
        origin_gets_per_s=rate("origin", "gets"),
        origin_heads_per_s=rate("origin", "heads"),
        origin_lists_per_s=rate("origin", "lists"),
        origin_bytes_per_s=rate("origin", "get_bytes"),
        origin_errors_per_s=rate("origin", "errors"),
        evicted_per_s=sum(tier.evicted_per_s for tier in tiers),
        cpu_ratio=None if cpu_s is None else cpu_s / seconds,
        rss_bytes=after.rss_bytes,
        tiers=tiers,
        users=users,
        writes=_write_rates(was.get("writes", {}), is_.get("writes"), seconds),
        shared=_shared_rates(was.get("shared", {}), is_.get("shared"), seconds),
    )


def _write_rates(
    before: Mapping[str, Any], after: Mapping[str, Any] | None, seconds: float
) -> WriteRates | None:
    if after is None:
        return None
    puts, parts, sent_bytes, errors = (
        _less(after, before, name) / seconds for name in ("puts", "parts", "sent_bytes", "errors")
    )
    return WriteRates(
        puts + parts, sent_bytes, errors, after["unsent_files"], after["unsent_bytes"]
    )


def _shared_rates(
    before: Mapping[str, Any], after: Mapping[str, Any] | None, seconds: float
) -> SharedRates | None:
    if after is None:
        return None
    names = ("hits", "misses", "hit_bytes")
    hits, misses, hit_bytes = (_less(after, before, name) / seconds for name in names)
    return SharedRates(hits, hit_bytes, hits / (hits + misses) if hits + misses else None)


def quantile(bounds_s: Sequence[float], cumulated: Sequence[int], share: float) -> float | None:
    """Return the time in seconds that `share` of the requests did not exceed, interpolated within
    the bucket as in Prometheus; None without requests. `cumulated` has one element more than
    `bounds_s`."""
    wanted = cumulated[-1] * share
    if not wanted:
        return None
    edges = zip(pairwise((0.0, *bounds_s)), pairwise((0, *cumulated)), strict=False)
    for (lower_s, upper_s), (below, count) in edges:
        if count >= wanted:
            return lower_s + (upper_s - lower_s) * (wanted - below) / (count - below)
    return bounds_s[-1]


def _less(after: Mapping[str, Any], before: Mapping[str, Any], name: str) -> float:
    """Return the increase of a counter. Counters never decrease, except that those of a tier which
    was removed and added again restart at 0."""
    lasting: float = after[name] - before.get(name, 0)
    return lasting if lasting >= 0 else after[name]


def _cumulated(before: Mapping[str, Any], after: Mapping[str, Any], operation: str) -> list[int]:
    """Return the number of requests that took no longer than each bound, then their total."""
    sums = [0] * (len(after["bounds_s"]) + 1)
    for sign, requests in ((1, after), (-1, before)):
        for found in requests.get("requests", ()):
            if found["operation"] == operation:
                counts = (*found["cumulated"], found["count"])
                sums = [total + sign * count for total, count in zip(sums, counts, strict=True)]
    return sums


def _tier_rates(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], seconds: float
) -> list[TierRates]:
    known = {tier["path"]: tier for tier in before}
    rates = []
    for tier in after:
        was = known.get(tier["path"], {})
        names = ("hits", "hit_bytes", "evicted")
        hits, hit_bytes, evicted = (_less(tier, was, name) / seconds for name in names)
        rates.append(TierRates(tier["path"], tier["medium"], hits, hit_bytes, evicted))
    return rates


def _user_rates(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> list[UserRates]:
    """Return the rates of all users, the highest read rate first."""
    known = {user["uid"]: user for user in before.get("users", ())}
    rates = []
    for user in after["users"]:
        was = known.get(user["uid"], {})
        read_bytes, stalled_s = (_less(user, was, name) for name in ("read_bytes", "stalled_s"))
        rates.append(UserRates(user["uid"], read_bytes / seconds, stalled_s / seconds))
    return sorted(rates, key=lambda user: user.bytes_per_s, reverse=True)
