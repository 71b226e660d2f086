"""A blocking call that is started now and awaited later, or never."""

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

import outcome
import trio

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Runs `work` in a thread at once. Dropping the object drops the result.

    A nursery can't be used here: the call outlives the function that starts it, and may have
    no one left to wait for it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._done = trio.Event()
        self._result: outcome.Outcome[T] | None = None
        self._token = trio.lowlevel.current_trio_token()
        trio.lowlevel.start_thread_soon(work, self._deliver)

    async def get(self) -> T:
        """The result, or the exception, of `work`."""
        await self._done.wait()
        assert self._result is not None
        return self._result.unwrap()

    def _deliver(self, result: outcome.Outcome[T]) -> None:
        self._result = result
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._done.set)
