"""The routes of the control socket. docs/CONTROL.md explains each.

A new route needs a line here and an entry in the daemon's table of handlers. The first part of a
path is the version. Within a version a route may get new arguments and new fields in its answers,
but loses none.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

from cachefs.errors import CacheDirError, CachefsError


class Route(NamedTuple):
    """A route of the control socket. A GET changes nothing, and its arguments are strings (the
    query). A POST has JSON arguments (the body), and may change something."""

    method: Literal["GET", "POST"]
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


Lines = AsyncGenerator[Mapping[str, object], None]

Handler = Callable[[dict[str, Any]], Awaitable[Mapping[str, object]] | Lines]
"""Answers a request: gets its arguments, and returns a mapping that JSON can represent, or an async
generator of many. The generator is closed when the client disconnects. The client receives the text
of an error that this raises; an error other than `CachefsError` is logged, too."""


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
CACHE_NAMES = Route("POST", "/v1/cache/names")
WRITES = Route("GET", "/v1/writes")
WRITES_CONTENT = Route("GET", "/v1/writes/content")
WRITES_DROP = Route("POST", "/v1/writes/drop")
WRITES_SEND = Route("POST", "/v1/writes/send")
WRITES_FLUSH = Route("POST", "/v1/writes/unsent/flush")
WRITES_LEAVE = Route("POST", "/v1/writes/leave")
METADATA_EXPORT = Route("GET", "/v1/metadata/export")
METADATA_IMPORT = Route("POST", "/v1/metadata/import")
CONSOLE_TOKEN = Route("POST", "/v1/console/token")


REPORT_ROUTES = (STATUS, REQUESTS, CACHE_USAGE)
"""What the socket for reports answers. None of them changes anything, or takes a path outside the
mount."""


class UnknownError(CachefsError):
    """The job or tier that the arguments name doesn't exist. The answer has the status 404."""


class NoSuchTierError(UnknownError, CacheDirError):
    """The mount has no such tier."""
