"""Who held the event loop, when somebody did for long."""

import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import trio
from typing_extensions import override

_LOOK_AFTER_S = 0.0005
_LOOK_EVERY_S = 0.0005
_MIN_TURN_NS = 500_000
_CALLERS = 3


class LongTurns(trio.abc.Instrument):
    """Of turns of 0.5 ms and more: how long they took, and in which functions they were found
    every half a millisecond. Costs some microseconds a turn: not for what is judged."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_ns: dict[str, int] = defaultdict(int)
        """By the functions that a turn was found in first."""
        self.total_ns: dict[str, int] = defaultdict(int)
        self.cpu_ns: dict[str, int] = defaultdict(int)
        self._began_ns = self._began_cpu_ns = 0
        self._places: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the main thread, and inside of the loop."""
        before = signal.signal(signal.SIGALRM, self._look)
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @override
    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._places.clear()
        self._began_ns, self._began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AFTER_S, _LOOK_EVERY_S)

    @override
    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        wall_ns = time.perf_counter_ns() - self._began_ns
        if wall_ns < _MIN_TURN_NS or not self._began_ns:
            return
        self.count += 1
        name = max(set(self._places), key=self._places.count) if self._places else task.name
        self.longest_ns[name] = max(self.longest_ns[name], wall_ns)
        self.total_ns[name] += wall_ns
        self.cpu_ns[name] += time.thread_time_ns() - self._began_cpu_ns

    def _look(self, _: int, frame: FrameType | None) -> None:
        names: list[str] = []
        while frame is not None and len(names) <= _CALLERS:
            code = frame.f_code
            if "/trio/" in code.co_filename:
                break
            if not code.co_name.startswith("<"):
                names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
            frame = frame.f_back
        if names:
            self._places.append(" < ".join(names))
