"""Settings of `ResilientOrigin`, and the state that it reports."""

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class Resilience:
    """`read_timeout_s`: a failing read returns its error within this time, not counting waits in a
    queue while the origin answers others, and restarted when bytes arrive. `request_timeout_s`: how
    long one request may take until its body arrives. `max_downloads`: the highest concurrency
    limit, in requests. `download_limit`: bytes per second.

    `write_timeout_s` is the same as `read_timeout_s` for a write, and `write_request_s` as
    `request_timeout_s`: the store may take long to answer when it has received all bytes.
    `assembly_s` takes the place of `write_request_s` while the store copies bytes or joins parts.
    """

    read_timeout_s: float = 5.0
    request_timeout_s: float = 2.0
    max_downloads: int = 64
    download_limit: float | None = None
    hedge: bool = False
    write_timeout_s: float = 60.0
    write_request_s: float = 20.0
    assembly_s: float = 60.0

    @property
    def deadline_s(self) -> float:
        """How long after its start a call reaches its deadline. The rest of `read_timeout_s` is for
        returning the result."""
        return 0.9 * self.read_timeout_s


class OriginState(TypedDict):
    """The state for `status`. `down_since` is seconds since the epoch, or None while the breaker is
    closed; `limit` is how many requests may be in flight now."""

    down_since: float | None
    problem: str | None
    limit: int
    in_flight: int
    queued: int
    retries: int
    busy_answers: int
    failed_calls: int
    hedges: int
