"""The route for `cachefs profile`: it watches all requests for some time."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import trio

from cachefs.control import api
from cachefs.control.api import Handler, Lines, Route
from cachefs.control.profile import Profile
from cachefs.errors import CachefsError, UsageError
from cachefs.fuse.observers import RequestObservers, path_of
from cachefs.namespace.namespace import Namespace
from cachefs.origin.resilience import ResilientOrigin

MOST_S = 3600.0
MOST_TOP = 100
_MOST_AT_ONCE = 4
"""The most profiles at a time. Each costs some microseconds per request."""


class ProfileRoutes:
    """Takes profiles. Each client has its own profile, which ends when the client disconnects."""

    def __init__(
        self, namespace: Namespace, origin: ResilientOrigin, observers: RequestObservers
    ) -> None:
        self._namespace = namespace
        self._origin = origin
        self._observers = observers
        self._under_way = 0

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {api.PROFILE: self.profile}

    async def profile(self, arguments: dict[str, Any]) -> Lines:
        """Watch for `seconds` (default 10), then yield one line with `top` (default 10) slowest
        requests and hottest paths."""
        seconds = arguments.get("seconds", 10)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise UsageError(f"seconds is a number, not {seconds!r}")
        if not 0 < seconds <= MOST_S:
            raise UsageError(f"seconds is above 0 and at most {MOST_S:g}, not {str(seconds)[:40]}")
        top = arguments.get("top", 10)
        if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MOST_TOP:
            raise UsageError(f"top is a number from 1 to {MOST_TOP}, not {top!r}")
        if self._under_way >= _MOST_AT_ONCE:
            raise CachefsError(
                f"{self._under_way} profiles are being taken already; try again when one has ended"
            )
        profile = Profile(top)
        before, began = self._origin_counts(), time.time()
        self._under_way += 1
        self._observers.append(profile.observe)
        try:
            await trio.sleep(seconds)
        finally:
            self._observers.remove(profile.observe)
            self._under_way -= 1
        after = self._origin_counts()
        yield {
            "began_at": began,
            "seconds": seconds,
            "origin": {name: after[name] - before[name] for name in before},
            **profile.report(partial(path_of, self._namespace)),
        }

    def _origin_counts(self) -> Mapping[str, int]:
        counters, health = self._origin.counters, self._origin.state()
        return {
            "gets": counters.gets,
            "heads": counters.heads,
            "lists": counters.lists,
            "get_bytes": counters.get_bytes,
            "errors": counters.errors,
            "retries": health["retries"],
            "failed_calls": health["failed_calls"],
        }
