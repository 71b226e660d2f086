"""The routes of the control socket: what a client may ask, by name. docs/CONTROL.md explains each.

A new one is a line here and an entry in the daemon's table of handlers. The first part of a path
is the version; what a route of one version takes and answers only ever grows.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

from cachefs.errors import CacheDirError, CachefsError


class Route(NamedTuple):
    """GET only looks, and its arguments are texts. POST changes something; its are JSON."""

    method: Literal["GET", "POST"]
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


Lines = AsyncGenerator[Mapping[str, object], None]

Handler = Callable[[dict[str, Any]], Awaitable[Mapping[str, object]] | Lines]
"""From the arguments of a request to a mapping that JSON can hold, or an async generator of many,
which is closed when the client leaves. What it raises is told to the client: the text of a
`CachefsError`; anything else is logged too."""


INDEX = Route("GET", "/v1")
STATUS = Route("GET", "/v1/status")
REQUESTS = Route("GET", "/v1/requests")
PROFILE = Route("POST", "/v1/profile")
SETTINGS = Route("GET", "/v1/settings")
SET = Route("POST", "/v1/settings")
TIERS = Route("GET", "/v1/tiers")
TIER_ADD = Route("POST", "/v1/tiers/add")
TIER_RESIZE = Route("POST", "/v1/tiers/resize")
TIER_REMOVE = Route("POST", "/v1/tiers/remove")
JOBS = Route("GET", "/v1/jobs")
JOB = Route("GET", "/v1/jobs/show")
JOB_WATCH = Route("GET", "/v1/jobs/watch")
JOB_FAILURES = Route("GET", "/v1/jobs/failures")
JOB_CREATE = Route("POST", "/v1/jobs/create")
JOB_LIST = Route("POST", "/v1/jobs/list")
JOB_START = Route("POST", "/v1/jobs/start")
JOB_CANCEL = Route("POST", "/v1/jobs/cancel")
JOB_RESUME = Route("POST", "/v1/jobs/resume")
CACHE_INFO = Route("POST", "/v1/cache/info")
CACHE_USAGE = Route("POST", "/v1/cache/usage")
CACHE_EVICT = Route("POST", "/v1/cache/evict")
CACHE_PIN = Route("POST", "/v1/cache/pin")
CACHE_UNPIN = Route("POST", "/v1/cache/unpin")
CACHE_REFRESH = Route("POST", "/v1/cache/refresh")
METADATA_EXPORT = Route("GET", "/v1/metadata/export")
METADATA_IMPORT = Route("POST", "/v1/metadata/import")


class UnknownError(CachefsError):
    """What the arguments name is not there: a job, a tier. Answered with 404."""


class NoSuchTierError(UnknownError, CacheDirError):
    """The mount has no such tier."""
