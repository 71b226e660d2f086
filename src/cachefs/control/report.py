"""The status of one mount, as the control socket carries it."""

from typing import TypedDict


class CacheStatus(TypedDict):
    """What is held, over all cache directories."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    dirs: list[str]


class ReadStatus(TypedDict):
    """Blocks asked for since the start: answered from the cache, or by the origin."""

    hits: int
    misses: int
    hit_bytes: int
    fetched_bytes: int


class OriginStatus(TypedDict):
    """Requests that the origin was sent since the start."""

    gets: int
    heads: int
    lists: int
    get_bytes: int
    errors: int


class StatusReport(TypedDict):
    """`started_at` is seconds since the epoch."""

    mountpoint: str
    source: str
    pid: int
    started_at: float
    version: str
    cache: CacheStatus
    reads: ReadStatus
    origin: OriginStatus
