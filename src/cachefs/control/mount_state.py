"""The status of a mount, and whether it is ready for use."""

import ipaddress
import os
import time
from collections.abc import Callable, Mapping

from cachefs import __version__
from cachefs.cache.block_cache import BlockCache
from cachefs.config import OFF, MountConfig, join_address, split_address
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.control.report import (
    PassthroughStatus,
    StatusReport,
    cache_report,
    data_path_report,
    relay_report,
    shared_report,
    tier_report,
    writes_report,
)
from cachefs.control.routes.set import SetRoutes
from cachefs.control.sessions import TOKEN_S, Sessions
from cachefs.errors import CachefsError
from cachefs.fuse.relay.stats import RelayStats
from cachefs.fuse.uid_limits import UidLimits
from cachefs.load.jobs import Jobs
from cachefs.metrics import BOUNDS_S, Requests
from cachefs.namespace.namespace import Namespace
from cachefs.origin.resilience import ResilientOrigin
from cachefs.types import DataPath
from cachefs.writes.unsent.report import KEPT, UnsentFiles, UnsentState


class MountState:
    """The parts of one mount, from which status and metrics are read."""

    def __init__(
        self,
        config: MountConfig,
        origin: ResilientOrigin,
        cache: BlockCache,
        limits: UidLimits,
        settings: SetRoutes,
        data_path: DataPath,
        requests: Requests,
        namespace: Namespace,
        jobs: Jobs,
        relay: RelayStats | None,
        passthrough: Callable[[], PassthroughStatus],
        unsent: UnsentFiles | None = None,
    ) -> None:
        """`unsent` are the unsent files of a writable mount."""
        self.data_path = data_path
        self.config = config
        self.origin = origin
        self.cache = cache
        self.limits = limits
        self.requests = requests
        self.namespace = namespace
        self.jobs = jobs
        self.relay = relay
        self.passthrough = passthrough
        self.unsent = unsent
        self.started_at = time.time()
        self.mounted = False
        """Whether the kernel has received an answer from this mount."""
        self.metrics_address: str | None = None
        """Where the metrics are; None if nobody serves them."""
        self.sessions = Sessions()
        """Who has opened the console with a token."""
        self._settings = settings

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route."""
        return {
            api.STATUS: self.answer_status,
            api.REQUESTS: self.answer_requests,
            api.CONSOLE_TOKEN: self.answer_token,
        }

    async def answer_status(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Answer with `status`, for the control socket."""
        return {**self.status()}

    async def answer_token(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Answer with a new one-time token for the console, and the console's `address`. Raises
        `CachefsError` if there is no console."""
        if self.metrics_address is None:
            raise CachefsError(
                f"{self.config.mountpoint} has no console, because nothing listens for metrics; "
                "mount without --metrics off"
            )
        host, port = split_address(self.metrics_address)
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
        return {
            "address": join_address(host, port),
            "token": self.sessions.new_token(),
            "valid_s": TOKEN_S,
        }

    async def answer_requests(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """Answer with the counts of `metrics.Requests` and `UidLimits`, for the control socket."""
        if self.relay is not None:
            self.relay.update()
        requests = [
            {
                "operation": operation,
                "outcome": outcome,
                "count": histogram.count,
                "seconds": histogram.sum_ns / 1e9,
                "cumulated": histogram.cumulated()[:-1],
            }
            for (operation, outcome), histogram in sorted(self.requests.histograms().items())
        ]
        users = [
            {"uid": uid, "read_bytes": read_bytes, "stalled_s": stalled_ns / 1e9}
            for uid, read_bytes, stalled_ns in self.limits.usage()
            if read_bytes or stalled_ns
        ]
        return {
            "bounds_s": BOUNDS_S,
            "waiting": self.requests.waiting,
            "requests": requests,
            "users": users,
        }

    def status(self) -> StatusReport:
        """Return what `cachefs status` shows. It has no secrets: the URL contains none."""
        if self.relay is not None:
            self.relay.update()
        tiers = self.cache.status()
        reads, origin = self.cache.counters, self.origin.counters
        stale = self.namespace.outage.state
        report: StatusReport = {
            "version": __version__,
            "mountpoint": str(self.config.mountpoint),
            "source": self.origin.url,
            "pid": os.getpid(),
            "supervisor_pid": self.data_path.supervisor_pid,
            "mounted": self.mounted,
            "data_path": data_path_report(self.data_path),
            "relay": None if self.relay is None else relay_report(self.relay.report()),
            "passthrough": self.passthrough(),
            "started_at": self.started_at,
            "policy": self.config.cache_eviction,
            "metrics": self.metrics_address,
            "stale": stale.is_stale,
            "stale_since": None if stale.since_ns is None else stale.since_ns / 1e9,
            "unshown_keys": sum(origin.unshown_in_dir.values()),
            "unshown_links": sum(origin.links_out_in_dir.values()),
            "cache": cache_report(tiers),
            "tiers": [tier_report(tier) for tier in tiers],
            "reads": {
                "hits": reads.hits,
                "misses": reads.misses,
                "hit_bytes": reads.hit_bytes,
                "fetched_bytes": reads.fetched_bytes,
            },
            "origin": {
                "gets": origin.gets,
                "heads": origin.heads,
                "lists": origin.lists,
                "get_bytes": origin.get_bytes,
                "errors": origin.errors,
            },
            "origin_health": self.origin.state(),
            "limits": self._settings.settings(),
            "errors": self.requests.last_errors.report(),
        }
        if self.cache.shared.members.option != OFF:
            report["shared"] = shared_report(self.cache.shared)
        if self.unsent is not None:
            report["writes"] = writes_report(self.unsent, origin.writes)
        return report

    def unsent_problem(self) -> str | None:
        """Return what is wrong with unsent files; None if nothing is."""
        if self.unsent is None:
            return None
        counts = self.unsent.counts().files
        failed, kept = counts[UnsentState.FAILED], sum(counts[state] for state in KEPT)
        if not failed + kept:
            return None
        return f"{failed} files could not be sent yet, and {kept} wait for a user (cachefs writes)"

    def unready_reason(self) -> str | None:
        """Return why new users must not use the mount now; None if it is ready.

        An unreachable origin is a reason only if stale names may not be shown (any longer).
        """
        if not self.mounted:
            return "not mounted yet"
        down_since = self.origin.state()["down_since"]
        patience_s = self.namespace.ttls.stale_if_error_s
        if down_since is None or time.time() - down_since < patience_s:
            return None
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(down_since))
        return f"the origin does not answer since {since}"
