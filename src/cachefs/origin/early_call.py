"""`EarlyCall`: a blocking call that starts now, and whose result is used later."""

import contextlib
from collections.abc import Callable
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
