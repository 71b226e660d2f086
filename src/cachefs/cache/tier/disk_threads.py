"""The threads of one cache directory, and the health of its disk.

Each directory has its own threads, so that a disk that hangs does not stall calls to other disks.
Each thread measures the time of its calls, and `watch` finds calls that do not return. `DiskHealth`
gets these times and decides whether the disk is usable.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, TypeVarTuple

import outcome
import trio

from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cache_dir.health import DiskHealth, Health
from cachefs.workers import Workers

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_READER_THREADS = 4
_WATCH_INTERVAL_S = 0.5


Step = Callable[[OSError | None], None]


class OverdueError(Exception):
    """The disk did not answer within `DiskHealth.patience_s`, the longest that a reader waits."""


class DiskThreads:
    """The reader, writer and probe threads of one tier; its `TierStore` owns the object.

    It accepts calls between `start` and `stop`. It calls `on_change`, which only
    its `ActiveTier` sets, when `health.usable` changes.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self.health = DiskHealth(directory.medium)
        self.health.on_change = self._changed
        self.on_change: Callable[[], None] = lambda: None
        self._probing = False
        self._under_way: dict[_Call[Any], float] = {}
        self._readers: Workers
        self._writer: Workers
        self._prober: Workers

    def start(self) -> None:
        """Create the thread pools. Call this on the event loop."""
        self._readers = Workers(_READER_THREADS, "cache-read")
        self._writer = Workers(1, "cache-write")
        self._prober = Workers(1, "cache-probe")

    def stop(self) -> None:
        """Accept no new calls. Accepted calls run to their end."""
        for workers in (self._readers, self._writer, self._prober):
            workers.stop()

    def detach(self) -> None:
        """Release cancelled callers although their threads hang. The tier is unusable afterwards,
        and its descriptors must stay open."""
        for workers in (self._readers, self._writer, self._prober):
            workers.detach()

    async def idle(self) -> None:
        """Wait until no thread uses a descriptor of the tier. After `stop` this stays true."""
        for workers in (self._readers, self._writer, self._prober):
            await workers.idle()

    # -- calls ---------------------------------------------------------------------------------

    async def read(self, size_bytes: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `function(*args)` in a reader thread and return its result. The call cannot be
        cancelled. Raises what `function` raises. `size_bytes` is the amount that it reads."""
        call = _Call(self._under_way, size_bytes, False, function, args)
        await self._readers.run(call.run)
        return self._account(call)

    async def write(self, size_bytes: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `function(*args)` in the writer thread; otherwise as `read`."""
        call = _Call(self._under_way, size_bytes, True, function, args)
        await self._writer.run(call.run)
        return self._account(call)

    async def write_in_steps(
        self, size_bytes: int, function: Callable[[Step, *Ts], T], *args: *Ts
    ) -> T:
        """Run `function(step, *args)` in the writer thread and return its result. The function
        must call `step(error)` after each of its writes, because `DiskHealth` judges each write
        on its own. `size_bytes` is the size of the largest write."""
        steps: list[tuple[float, OSError | None]] = []

        def step(error: OSError | None) -> None:
            steps.append((call.lap(), error))

        call = _Call(self._under_way, size_bytes, True, function, (step, *args))
        await self._writer.run(call.run)
        now_s = time.monotonic()
        for duration_s, error in steps:
            self.health.operation_done(duration_s, size_bytes, error, now_s, write=True)
        return call.outcome.unwrap()

    async def read_patiently(
        self,
        give_back: Callable[[], None],
        size_bytes: int,
        function: Callable[[*Ts], T],
        *args: *Ts,
    ) -> T:
        """Run `function(*args)` as `read` does, but raise `OverdueError` if the disk takes longer
        than `DiskHealth.patience_s`. The caller can be cancelled. `give_back` is called once the
        thread is done, even if no caller waits for it any more."""
        call = _Call(self._under_way, size_bytes, False, function, args)
        given_up = False

        def finish() -> None:
            if given_up:
                self._judge(call)
            give_back()

        patience_s = self.health.patience_s
        with trio.move_on_after(patience_s) as scope:
            try:
                await self._readers.run_lending(finish, call.run)
            except trio.Cancelled:
                given_up = True
                raise
        if scope.cancelled_caught:
            now_s = time.monotonic()
            started_s = self._under_way.get(call, now_s)  # the thread may not have begun the call
            self.health.operation_overdue(now_s - started_s, now_s, size_bytes)
            raise OverdueError
        return self._account(call)

    def _account(self, call: "_Call[T]") -> T:
        self._judge(call)
        return call.outcome.unwrap()

    def _judge(self, call: "_Call[Any]") -> None:
        error = call.outcome.error if isinstance(call.outcome, outcome.Error) else None
        if error is None or isinstance(error, OSError):
            self.health.operation_done(
                call.duration_s, call.size_bytes, error, time.monotonic(), write=call.write
            )

    # -- watching ------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Report calls that hang to `health`, and probe the disk while it is unusable. Never
        returns."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(_WATCH_INTERVAL_S)
                self._look(nursery)

    def _look(self, nursery: trio.Nursery) -> None:
        now_s = time.monotonic()
        for call, started_s in list(self._under_way.items()):
            age_s = now_s - started_s
            self.health.operation_overdue(age_s, now_s, call.size_bytes, write=call.write)
        if self.health.probe_due(now_s) and not self._probing:
            self._probing = True
            nursery.start_soon(self._probe)

    async def _probe(self) -> None:
        call = _Call(self._under_way, 0, True, self._directory.probe, ())
        await self._prober.run_lending(lambda: None, call.run)
        failure = call.outcome.error if isinstance(call.outcome, outcome.Error) else None
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        self._probing = False
        self.health.probe_done(call.duration_s, failure, time.monotonic())

    def _changed(self, before: Health, after: Health, reason: str) -> None:
        path = self._directory.paths.root
        if after is Health.NORMAL:
            log.info("%s: the disk answers again; it is used from now on", path)
        else:
            log.warning("%s: the disk is %s: %s; reads go around it", path, after.value, reason)
        if (before is Health.NORMAL) != (after is Health.NORMAL):
            self.on_change()


class _Call(Generic[T]):
    """One call of a function in a thread, with its duration there. `run` sets `outcome`."""

    __slots__ = (
        "_args",
        "_function",
        "_under_way",
        "duration_s",
        "outcome",
        "size_bytes",
        "write",
    )

    outcome: outcome.Outcome[T]

    def __init__(
        self,
        under_way: "dict[_Call[Any], float]",
        size_bytes: int,
        write: bool,
        function: Callable[..., T],
        args: tuple[Any, ...],
    ) -> None:
        self._under_way = under_way
        self.size_bytes = size_bytes
        self.write = write
        self._function = function
        self._args = args
        self.duration_s = 0.0

    def run(self) -> None:
        """Call the function. This runs in the thread; setting one item of a dict is atomic."""
        started_s = self._under_way[self] = time.monotonic()
        self.outcome = outcome.capture(self._function, *self._args)
        self.duration_s = time.monotonic() - started_s
        del self._under_way[self]

    def lap(self) -> float:
        """Return the seconds since the start or the last `lap`, and begin a new lap. This runs in
        the thread."""
        now_s = time.monotonic()
        duration_s = now_s - self._under_way[self]
        self._under_way[self] = now_s
        return duration_s
