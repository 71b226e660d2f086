"""A profile of the kernel's requests in a time window: sums, slowest requests, hottest paths.

Its memory is bounded for any number of files, and it costs some microseconds per request.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cachefs.fuse.observers import Answered, PathOf
from cachefs.metrics import BOUNDS_S, Histogram

Key = int | tuple[int, bytes]
"""An inode number, or, for a look-up, a directory's inode number and the name."""


class Heat(NamedTuple):
    """The cost of one path so far: requests, bytes returned, and their duration in ns."""

    requests: int = 0
    given_bytes: int = 0
    lasted_ns: int = 0

    def plus(self, other: "Heat") -> "Heat":
        """Return the sum of both."""
        return Heat(*(mine + its for mine, its in zip(self, other, strict=True)))


_RANKS: Mapping[str, Callable[[Heat], int]] = {
    "requests": lambda heat: heat.requests,
    "bytes": lambda heat: heat.given_bytes,
    "seconds": lambda heat: heat.lasted_ns,
}


class HotKeys:
    """The keys with the most requests, bytes and seconds, of any number of keys.

    When there are too many keys, those that are low in all three are dropped. A key that is noted
    again later lacks what it had before; `missed` is the upper bound of that.
    """

    def __init__(self, capacity: int = 2048) -> None:
        """At most twice `capacity` keys are held at a time."""
        self._capacity = capacity
        self._found: dict[Key, list[int]] = {}
        self._missed = [0, 0, 0]

    def note(self, key: Key, given_bytes: int, lasted_ns: int) -> None:
        """Add one request."""
        heat = self._found.get(key)
        if heat is None:
            if len(self._found) >= 2 * self._capacity:
                self._forget()
            heat = self._found[key] = [0, 0, 0]
        heat[0] += 1
        heat[1] += given_bytes
        heat[2] += lasted_ns

    @property
    def missed(self) -> Heat:
        """The most that any key's numbers may lack."""
        return Heat(*self._missed)

    def items(self) -> list[tuple[Key, Heat]]:
        """Return all keys that are held, with their numbers."""
        return [(key, Heat(*heat)) for key, heat in self._found.items()]

    def _forget(self) -> None:
        """Drop the keys that are not above the mark in any of the three: at least half of all."""
        place = self._capacity // len(self._missed)
        marks = [
            sorted((heat[rank] for heat in self._found.values()), reverse=True)[place]
            for rank in range(len(self._missed))
        ]
        self._missed = [missed + mark for missed, mark in zip(self._missed, marks, strict=True)]
        requests, given_bytes, lasted_ns = marks
        self._found = {
            key: heat
            for key, heat in self._found.items()
            if heat[0] > requests or heat[1] > given_bytes or heat[2] > lasted_ns
        }


class Profile:
    """The profile of the requests that are answered while `observe` is called for them. It runs on
    the loop thread."""

    def __init__(self, top: int) -> None:
        """`top` is the number of slowest requests and of hottest paths in the report."""
        self._top = top
        self._times: dict[tuple[str, str], tuple[Histogram, list[int]]] = {}
        self._slowest: list[tuple[int, int, Answered]] = []
        self._count = 0
        self._hot = HotKeys()

    def observe(self, answered: Answered, path_of: PathOf) -> None:
        """Note one request. This method is a `RequestObserver`."""
        self._count += 1
        lasted_ns = answered.lasted_ns
        key = answered.operation, answered.outcome
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = Histogram(), [0]
        histogram, longest = times
        histogram.note(lasted_ns)
        longest[0] = max(longest[0], lasted_ns)
        if len(self._slowest) < self._top:
            heapq.heappush(self._slowest, (lasted_ns, self._count, answered))
        elif lasted_ns > self._slowest[0][0]:
            heapq.heapreplace(self._slowest, (lasted_ns, self._count, answered))
        self._hot.note(_key(answered), answered.given_bytes, lasted_ns)

    def report(self, path_of: PathOf) -> dict[str, object]:
        """Return the profile as a mapping for JSON."""
        return {
            "requests": self._count,
            "operations": self._operations(),
            "slowest": [
                _slow(answered, path_of) for _, _, answered in sorted(self._slowest, reverse=True)
            ],
            "hottest": self._hottest(path_of),
            "missed": _heat(self._hot.missed),
        }

    def _operations(self) -> list[dict[str, object]]:
        """Return the sums per operation and outcome, those with the most time first."""
        times = sorted(self._times.items(), key=lambda item: item[1][0].sum_ns, reverse=True)
        return [
            {
                "operation": operation,
                "outcome": outcome,
                "count": histogram.count,
                "seconds": histogram.sum_ns / 1e9,
                "p99_s": min(_quantile_s(histogram, 0.99), longest[0] / 1e9),
                "max_s": longest[0] / 1e9,
            }
            for (operation, outcome), (histogram, longest) in times
        ]

    def _hottest(self, path_of: PathOf) -> dict[str, list[dict[str, object]]]:
        """Return the hottest paths for each rank; a path's look-ups and reads are added up."""
        by_path: dict[str, Heat] = {}
        for key, heat in self._candidates():
            path = _path(key, path_of)
            by_path[path] = by_path.get(path, Heat()).plus(heat)
        return {
            name: [
                {"path": path, **_heat(heat)}
                for path, heat in heapq.nlargest(
                    self._top, by_path.items(), key=lambda item: rank(item[1])
                )
                if rank(heat)
            ]
            for name, rank in _RANKS.items()
        }

    def _candidates(self) -> list[tuple[Key, Heat]]:
        """Return the keys that may be among the first. Only these get a path, as finding a path
        takes time. A path has two keys, so more keys than paths are needed."""
        items = self._hot.items()
        chosen: dict[Key, Heat] = {}
        for rank in _RANKS.values():
            chosen |= heapq.nlargest(4 * self._top, items, key=lambda item: rank(item[1]))
        return list(chosen.items())


def _key(answered: Answered) -> Key:
    if answered.operation == "lookup" and answered.name is not None:
        return answered.ino, answered.name
    return answered.ino


def _path(key: Key, path_of: PathOf) -> str:
    if isinstance(key, int):
        return path_of(key)
    ino, name = key
    return f"{path_of(ino).rstrip('/')}/{name.decode('utf-8', 'surrogateescape')}"


def _slow(answered: Answered, path_of: PathOf) -> dict[str, object]:
    return {
        "seconds": answered.lasted_ns / 1e9,
        "operation": answered.operation,
        "outcome": answered.outcome,
        "path": _path(_key(answered), path_of),
        "uid": answered.uid,
        "pid": answered.pid,
        "offset": answered.offset,
        "size_bytes": None if answered.offset is None else answered.wanted_bytes,
    }


def _heat(heat: Heat) -> dict[str, object]:
    return {
        "requests": heat.requests,
        "bytes": heat.given_bytes,
        "seconds": heat.lasted_ns / 1e9,
    }


def _quantile_s(histogram: Histogram, share: float) -> float:
    """Return the first bound (seconds) at or below which `share` of the requests were."""
    wanted = histogram.count * share
    for bound_s, count in zip(BOUNDS_S, histogram.cumulated(), strict=False):
        if count >= wanted:
            return bound_s
    return float("inf")
