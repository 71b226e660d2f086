"""Runs calls that may never return, such as system calls on a mount whose daemon hangs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from cachefs.errors import CachefsError

Result = TypeVar("Result")


class CallHangsError(CachefsError):
    """A call has not returned within its limit."""


class LimitedCalls:
    """Runs each call in a thread and waits for it for at most `limit_s` seconds.

    Calls with the same key run one after the other, so at most one thread for each key hangs. While
    it has hung for longer than the limit, further calls with its key fail at once.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._changed = threading.Condition()
        self._began: dict[str, float] = {}

    def run(
        self, key: str, function: Callable[[], Result], dispose: Callable[[Result], None]
    ) -> Result:
        """Return the result of `function`, or raise what it raises.

        Raises `CallHangsError` if there is no result within the limit. A result that comes later is
        given to `dispose`.
        """
        deadline = time.monotonic() + self.limit_s
        self._enter(key, deadline)
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._leave(key)

        def dispose_late(late: Future[Result]) -> None:
            if late.exception() is None:
                dispose(late.result())

        threading.Thread(target=work, name=f"csi-call-{key}", daemon=True).start()
        wait([future], max(0.0, deadline - time.monotonic()))
        if not future.done():
            future.add_done_callback(dispose_late)
            raise CallHangsError(f"no answer within {self.limit_s:g} s")
        return future.result()

    def _enter(self, key: str, deadline: float) -> None:
        """Wait until no other call has the key. Raises `CallHangsError`."""
        with self._changed:
            while key in self._began:
                now = time.monotonic()
                if now >= min(deadline, self._began[key] + self.limit_s):
                    raise CallHangsError(f"no answer for {now - self._began[key]:.0f} s")
                self._changed.wait(min(deadline, self._began[key] + self.limit_s) - now)
            self._began[key] = time.monotonic()

    def _leave(self, key: str) -> None:
        with self._changed:
            del self._began[key]
            self._changed.notify_all()
