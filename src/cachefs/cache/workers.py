"""A few threads for blocking disk calls, with a short way there and back.

`trio.to_thread` sends every call through a limiter, a thread cache and a context copy; for reads
of 20 us that way is the price (measured with 16 tasks: 140-180 us a call against 43-45 us here;
with one task 250 against 140). Tasks queue in order of arrival.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio
from trio.lowlevel import Abort, Task

from cachefs.errors import OriginUnavailableError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_Job = tuple[Task, Callable[..., Any], tuple[Any, ...]]


class Workers:
    """Started inside the loop. Calls begin in order of arrival."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._calls = 0
        self._idle = trio.lowlevel.ParkingLot()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """`function(*args)` in a worker thread.

        Once begun it can't be cancelled: the caller goes on only when the thread is done with
        whatever it was lent (slots, buffers, file descriptors).
        """
        if self._stopped:
            raise OriginUnavailableError("the cache is shutting down")
        self._calls += 1
        self._jobs.put((trio.lowlevel.current_task(), function, args))
        try:
            result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: Abort.FAILED)
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._idle.unpark_all()
        return result

    async def idle(self) -> None:
        """Wait until no call is under way. After `stop` none can follow."""
        while self._calls:
            await self._idle.park()

    def stop(self) -> None:
        """End the threads after what is queued; no call is accepted any more."""
        self._stopped = True
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            task, function, args = job
            result = outcome.capture(function, *args)
            try:
                self._token.run_sync_soon(trio.lowlevel.reschedule, task, result)
            except trio.RunFinishedError:
                return
            del job, task, function, args, result  # a result may be a whole block
