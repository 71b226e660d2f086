"""Calls that start now, and whose results are used later: `EarlyCall` in a thread, `EarlyTask` on
the loop."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import outcome
import trio

T = TypeVar("T")


class EarlyCall(Generic[T]):
    """Starts `work` in a thread at once. If this object is dropped, the result is dropped, too.

    A nursery does not fit here, because the call outlives the function that starts it, and perhaps
    no task awaits the result.
    """

    def __init__(self, work: Callable[[], T], give_up: Callable[[], None] | None = None) -> None:
        """`give_up` is called if the only task that waits for the result is cancelled."""
        self._give_up = give_up
        self._done = trio.Event()
        self._result: outcome.Outcome[T] | None = None
        self._token = trio.lowlevel.current_trio_token()
        trio.lowlevel.start_thread_soon(work, self._deliver)

    async def get(self) -> T:
        """Wait for `work`. Return its result, or raise its exception."""
        try:
            await self._done.wait()
        finally:
            if self._give_up is not None:
                self._give_up()
        assert self._result is not None
        return self._result.unwrap()

    def _deliver(self, result: outcome.Outcome[T]) -> None:
        self._result = result
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._done.set)


class EarlyTask(Generic[T]):
    """Does the same with a function of the loop, in a task of its own. If the only task that waits
    for the result is cancelled, the call is, too."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._scope = trio.CancelScope()
        self._done = trio.Event()
        self._result: outcome.Outcome[T] | None = None
        trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        with self._scope:
            try:
                self._result = outcome.Value(await self._work())
            except Exception as error:
                self._result = outcome.Error(error)
        self._done.set()

    async def get(self) -> T:
        """Wait for `work`. Return its result, or raise its exception."""
        try:
            await self._done.wait()
        finally:
            self._scope.cancel()
        assert self._result is not None
        return self._result.unwrap()
