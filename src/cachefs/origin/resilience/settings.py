"""How patient to be, and how it goes."""

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class Resilience:
    """`read_timeout_s` is when a reader has its error at the latest, `request_timeout_s` what one
    request may take until the body comes. `download_limit` is bytes per second."""

    read_timeout_s: float = 5.0
    request_timeout_s: float = 2.0
    max_downloads: int = 64
    download_limit: float | None = None
    hedge: bool = False

    @property
    def patience_s(self) -> float:
        """The rest of `read_timeout_s` is for the way back."""
        return 0.9 * self.read_timeout_s


class OriginHealth(TypedDict):
    """For `status`. `down_since` is seconds since the epoch, None while the origin answers;
    `limit` is how many requests may be under way now."""

    down_since: float | None
    problem: str | None
    limit: int
    in_flight: int
    queued: int
    retries: int
    busy_answers: int
    failed_calls: int
    hedges: int
