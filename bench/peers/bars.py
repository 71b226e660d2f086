"""The bars: the ratios that cachefs must reach against the other peers."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.peers.figures import FIGURES, Measures


@dataclass(frozen=True, slots=True)
class Bar:
    """cachefs must be `at_least` times as good as `against` (for times: their time by ours)."""

    key: str
    against: str
    at_least: float
    their_key: str | None = None
    """The figure of the other peer, if it differs from `key`."""

    @property
    def target(self) -> str:
        if FIGURES[self.key].less_is_better:
            return f"<= {1 / self.at_least:.3g}x the time"
        return f">= {self.at_least:g}x"


BARS = (
    Bar("cached.warm.1", "local", 0.8),
    Bar("cached.warm.1", "JuiceFS", 4),
    Bar("cached.warm.4", "JuiceFS", 3),
    Bar("memory.dropped.4", "JuiceFS", 4, their_key="cached.dropped.4"),
    Bar("cached.dropped.1", "JuiceFS", 1.5),
    Bar("cached.dropped.4", "JuiceFS", 1.5),
    Bar("cold.1", "JuiceFS", 1),
    Bar("cold.16", "JuiceFS", 1.5),
    Bar("large.cold", "JuiceFS", 1),
    Bar("large.dropped", "JuiceFS", 1.5),
    Bar("large.warm", "JuiceFS", 1),
    Bar("names.ls.warm", "JuiceFS", 2.5),
    Bar("names.ls.warm", "local", 0.5),
    Bar("names.find.warm", "JuiceFS", 5),
    Bar("import.first", "JuiceFS", 1),
    Bar("import.second", "local", 1 / 1.1),
    Bar("epochs.hits", "JuiceFS", 2.5),
    Bar("epochs.speed", "JuiceFS", 1),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The medians of both peers and their comparison. `ratio` is None if a median is missing."""

    bar: Bar
    ours: float | None
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """The ratio of the medians, ours by theirs."""
        if self.ours is None or not self.theirs:
            return None
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        if self.ratio is None:
            return None
        if FIGURES[self.bar.key].less_is_better:
            return self.ratio <= 1 / self.bar.at_least
        return self.ratio >= self.bar.at_least


def judge(measures: Measures) -> Sequence[Verdict]:
    """Return the verdict on every bar, in order."""
    return [
        Verdict(
            bar,
            measures.median(bar.key, "cachefs"),
            measures.median(bar.their_key or bar.key, bar.against),
        )
        for bar in BARS
    ]
