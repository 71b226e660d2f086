"""Streams of file numbers, and the optimal hit ratio of any cache for them."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

FILES = 4_000
"""The number of files in a data set. `f` is the share of one data set that fits in the quota."""
FILE_BYTES = 39_936
"""The size of exactly one slot, so that slots lose no space."""
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Figure:
    """A hit ratio over some phases. `bar` computes the ratio that `epoch` must reach from f and
    lru's ratio."""

    name: str
    phases: Sequence[int]
    bar: Callable[[float, float], float] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """The files that one reader reads, phase by phase. `f` is the intended share; the real one
    differs a little, because the quota consists of whole slabs. `sizes` are the bytes of each file,
    if they differ."""

    name: str
    f: float
    phases: Sequence[Sequence[int]]
    figures: Sequence[Figure]
    sizes: Sequence[int] | None = field(default=None, repr=False)
    for_all_policies: bool = True

    @property
    def data_bytes(self) -> int:
        """The bytes of one data set."""
        return FILES * FILE_BYTES if self.sizes is None else sum(self.sizes)

    def size_of(self, number: int) -> int:
        return FILE_BYTES if self.sizes is None else self.sizes[number]


def all_workloads(quick: bool) -> list[Workload]:
    """Return all workloads, or with `quick` one of each kind with fewer requests."""
    fractions = (0.385,) if quick else (0.2, 0.385, 0.6, 0.8)
    zipfs = ((1.0, 0.385),) if quick else ((0.7, 0.1), (0.7, 0.385), (1.0, 0.1), (1.0, 0.385))
    return [
        *(shuffled(f) for f in fractions),
        switched(),
        switched_to_small(),
        *(zipf(skew, f, quick) for skew, f in zipfs),
        hot_and_scan(quick),
        alternating(),
        *([] if quick else [mixed_sizes()]),
    ]


def shuffled(f: float) -> Workload:
    """Return a training: every file once per epoch, in a new order each time."""
    figures = [Figure("epochs 3-8", range(2, 8), lambda f, _: 0.93 * f)]
    return Workload("shuffle", f, _epochs(8, range(FILES)), figures)


def switched() -> Workload:
    """Return a training on one data set, then on another."""
    phases = _epochs(6, range(FILES)) + _epochs(4, range(FILES, 2 * FILES))
    figures = [Figure(f"B's epoch {n + 1}", [6 + n]) for n in range(4)]
    figures[2] = Figure("B's epoch 3", [8], lambda f, _: 0.85 * f)
    return Workload("switch", 0.385, phases, figures)


def switched_to_small() -> Workload:
    """Return the same, but with a second data set that fits in the cache."""
    phases = _epochs(6, range(FILES)) + _epochs(6, range(FILES, FILES + FILES // 10))
    figures = [Figure(f"B's epoch {n + 1}", [6 + n]) for n in range(6)]
    return Workload("switch to small", 0.385, phases, figures)


def zipf(skew: float, f: float, quick: bool) -> Workload:
    """Return requests for the file of rank r with a probability proportional to 1 / r ** skew."""
    chance = random.Random(f"zipf{skew}")
    files = list(range(FILES))
    chance.shuffle(files)
    shares = list(accumulate(1 / rank**skew for rank in range(1, FILES + 1)))
    warm_up, measured = _requests(quick)
    phases = [chance.choices(files, cum_weights=shares, k=k) for k in (warm_up, measured)]
    figures = [Figure("", [1], lambda _, lru: lru)]
    telling = (skew, f) == (1.0, 0.385)
    return Workload(f"zipf({skew})", f, phases, figures, for_all_policies=telling)


def hot_and_scan(quick: bool) -> Workload:
    """Return a workload in which 5 % of the files get 70 % of the requests. The other requests
    read each file only once."""
    chance = random.Random("scan")
    hot, scanned = FILES // 20, FILES
    phases: list[list[int]] = []
    for count in _requests(quick):
        phase = []
        for _ in range(count):
            if chance.random() < 0.7:
                phase.append(chance.randrange(hot))
            else:
                phase.append(scanned)
                scanned += 1
        phases.append(phase)
    return Workload("hot + scan", 0.2, phases, [Figure("", [1], lambda _, lru: lru)])


def alternating() -> Workload:
    """Return two trainings that alternate, epoch by epoch."""
    first, second = _epochs(5, range(FILES)), _epochs(5, range(FILES, 2 * FILES))
    phases = [epoch for pair in zip(first, second, strict=True) for epoch in pair]
    figures = [Figure("rounds 3-5", range(4, 10), lambda _, lru: lru - 0.005)]
    return Workload("two in turn", 0.385, phases, figures)


def mixed_sizes() -> Workload:
    """Return `shuffled` with files of 20 to 180 KB; it shows the cost of size classes."""
    chance = random.Random(20_180)
    sizes = [chance.randrange(20_000, 180_001) for _ in range(FILES)]
    figures = [Figure("epochs 3-8", range(2, 8))]
    epochs = _epochs(8, range(FILES))
    return Workload("shuffle, 20-180 KB", 0.385, epochs, figures, sizes, for_all_policies=False)


def _epochs(count: int, files: range) -> list[list[int]]:
    chance = random.Random(f"{count} {files}")
    return [chance.sample(files, len(files)) for _ in range(count)]


def _requests(quick: bool) -> tuple[int, int]:
    return (10_000, 20_000) if quick else (20_000, 100_000)


def optimum(phases: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return the hits in each phase of a cache of `capacity` files with knowledge of the future.
    It evicts, or does not admit, the file whose next use is latest (Belady, with bypass)."""
    stream = [number for phase in phases for number in phase]
    next_use = [_NEVER] * len(stream)
    seen: dict[int, int] = {}
    for position in range(len(stream) - 1, -1, -1):
        next_use[position] = seen.get(stream[position], _NEVER)
        seen[stream[position]] = position
    resident: dict[int, int] = {}  # file -> next use
    latest: list[tuple[int, int]] = []  # (-next use, file); some rows are out of date
    hits, position = [0] * len(phases), 0
    for number, phase in enumerate(phases):
        for file in phase:
            following = next_use[position]
            position += 1
            if file in resident:
                hits[number] += 1
            elif len(resident) >= capacity:
                while resident.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if -latest[0][0] <= following:
                    continue
                del resident[heapq.heappop(latest)[1]]
            resident[file] = following
            heapq.heappush(latest, (-following, file))
    return hits
