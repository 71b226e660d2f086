"""A few threads for blocking calls, with a short way there and back.

`trio.to_thread` sends every call through a limiter, a thread cache and a context copy; for calls
of 20 us that way is the price (measured with 16 tasks: 140-180 us a call against 43-45 us here;
with one task 250 against 140).
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from cachefs.errors import OriginUnavailableError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Job:
    """`task` is None once nobody waits for the result any more."""

    __slots__ = ("afterwards", "args", "function", "raise_cancel", "task")

    def __init__(self, task: Task, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.task: Task | None = task
        self.function = function
        self.args = args
        self.afterwards: Callable[[], None] | None = None
        self.raise_cancel: RaiseCancelT | None = None


class Workers:
    """Made inside the loop. Calls begin in order of arrival, `count` at a time at most; threads
    are started as they are needed, and stay."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._calls = 0
        """Jobs handed over and not yet heard of again, abandoned ones included."""
        self._held: set[_Job] = set()
        """Of callers of `run` who were cancelled and wait nevertheless."""
        self._deserted = False
        self._idle = trio.lowlevel.ParkingLot()
        self._stopped = False
        self._threads = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """`function(*args)` in a worker thread.

        Once begun it can't be cancelled: the caller goes on only when the thread is done with
        whatever it was lent (slots, buffers, file descriptors), or after `desert`.
        """
        job = self._submit(function, args)

        def hold(raise_cancel: RaiseCancelT) -> Abort:
            if self._deserted:
                job.task = None
                return Abort.SUCCEEDED
            job.raise_cancel = raise_cancel
            self._held.add(job)
            return Abort.FAILED

        result: T = await trio.lowlevel.wait_task_rescheduled(hold)
        return result

    async def run_abandonable(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The same for a function that is lent nothing: a cancelled caller goes on at once, the
        call runs to its end unheard."""
        result: T = await self._wait(self._submit(function, args))
        return result

    async def run_lending(
        self, give_back: Callable[[], None], function: Callable[[*Ts], T], *args: *Ts
    ) -> T:
        """The same for a function that is lent something. `give_back` is called on the loop, once,
        when the thread is done with it, whether or not somebody still waits."""
        try:
            job = self._submit(function, args)
        except BaseException:
            give_back()
            raise
        job.afterwards = give_back
        result: T = await self._wait(job)
        return result

    @staticmethod
    async def _wait(job: _Job) -> Any:
        def abandon(_: Any) -> Abort:
            job.task = None
            return Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(abandon)

    def _submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Job:
        if self._stopped:
            raise OriginUnavailableError("the mount is shutting down")
        self._calls += 1
        if self._calls > self._threads and self._threads < self._count:
            self._threads += 1
            name = f"{self._name}-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        job = _Job(trio.lowlevel.current_task(), function, args)
        self._jobs.put(job)
        return job

    async def idle(self) -> None:
        """Wait until no call is under way. After `stop` none can follow."""
        while self._calls:
            await self._idle.park()

    def desert(self) -> None:
        """Let cancelled callers of `run` go although their threads are not done: what those
        were lent must never be used for anything else."""
        self._deserted = True
        for job in self._held:
            task, job.task = job.task, None
            if task is not None and job.raise_cancel is not None:
                trio.lowlevel.reschedule(task, outcome.capture(job.raise_cancel))
        self._held.clear()

    def stop(self) -> None:
        """End the threads after what is queued; no call is accepted any more."""
        self._stopped = True
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result = outcome.capture(job.function, *job.args)
            try:
                self._token.run_sync_soon(self._deliver, job, result)
            except trio.RunFinishedError:
                return
            del job, result  # a result may be a whole block

    def _deliver(self, job: _Job, result: outcome.Outcome[Any]) -> None:
        """On the loop."""
        self._calls -= 1
        self._held.discard(job)
        if self._calls == 0:
            self._idle.unpark_all()
        if job.afterwards is not None:
            job.afterwards()
        if job.task is not None:
            trio.lowlevel.reschedule(job.task, result)
