"""Find the functions that block the event loop for long.

In one round, the loop runs all runnable tasks between two checks for external events. A request
that arrives during a round waits until the round ends, whichever tasks run in it.
"""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import trio
from typing_extensions import override

_LOOK_EVERY_S = 0.0005
_LONG_NS = 1_000_000
_CALLERS = 3


class LongRounds(trio.abc.Instrument):
    """Records rounds of 1 ms and more: their duration, and a stack sample every half a millisecond.
    It costs some microseconds per round, so don't use it in a measurement with a bar."""

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = self.cpu_ns = 0
        self.found: Counter[str] = Counter()
        """The number of samples in long rounds, by function with its callers."""
        self.longest_ns: dict[str, int] = {}
        """The longest round in which a function had the most samples, by function."""
        self._began_ns = self._began_cpu_ns = 0
        self._places: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record within the context. Call this in the main thread and inside the loop."""
        before = signal.signal(signal.SIGALRM, self._look)
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @override
    def after_io_wait(self, timeout: float) -> None:
        self._places.clear()
        self._began_ns, self._began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S, _LOOK_EVERY_S)

    @override
    def before_io_wait(self, timeout: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        wall_ns = time.perf_counter_ns() - self._began_ns
        if wall_ns < _LONG_NS or not self._began_ns:
            return
        self.count += 1
        self.total_ns += wall_ns
        self.cpu_ns += time.thread_time_ns() - self._began_cpu_ns
        found = Counter(self._places or ["?"])
        self.found += found
        name = found.most_common(1)[0][0]
        self.longest_ns[name] = max(self.longest_ns.get(name, 0), wall_ns)

    def _look(self, _: int, frame: FrameType | None) -> None:
        names: list[str] = []
        while frame is not None and len(names) <= _CALLERS:
            module = frame.f_globals.get("__name__", "")
            if names and module.startswith("trio."):
                break
            names.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_name}")
            frame = frame.f_back
        self._places.append(" < ".join(names))
