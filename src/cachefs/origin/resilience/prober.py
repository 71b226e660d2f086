"""`Prober`: finds out when an origin stops answering, and when it answers again."""

import logging
import random
import time
from itertools import cycle

import trio

from cachefs.errors import OriginBusyError, OriginError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.origin.resilience.breaker import Breaker
from cachefs.origin.resilience.settings import Resilience

log = logging.getLogger(__name__)

_INTERVAL_S = (0.3, 0.7)


class Prober:
    """Owns the breaker of `origin`, and sends probes while the requests of others fail. The breaker
    can open only while `run` is running."""

    def __init__(self, origin: Origin, settings: Resilience, rng: random.Random) -> None:
        self.down_since: float | None = None
        """In seconds since the epoch; None while the breaker is closed."""
        self.back = trio.Event()
        """Set when a run of failures has ended. Each run of failures has a new event."""
        self._origin = origin
        self._deadline_s = settings.deadline_s
        self._probe_s = settings.request_timeout_s
        self._random = rng
        self._breaker = Breaker(settings.deadline_s)
        self._nursery: trio.Nursery | None = None
        self._watching = False
        self._answered_path = ""
        """An object that the origin has answered for."""

    @property
    def is_down(self) -> bool:
        """Whether the breaker is open, so that new calls fail at once."""
        return self._breaker.is_open

    @property
    def problem(self) -> str:
        """The message of the last failure."""
        return self._breaker.reason

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send probes when they are needed. Runs until it is cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def note_failure(self, began_at: float, reason: str, path: str) -> None:
        """Record that the request for `path` that was sent at `began_at` got no answer or a server
        error."""
        now = trio.current_time()
        self._breaker.failed(began_at, now, reason)
        if self._nursery is not None and not self._watching and self._breaker.is_suspect(now):
            self._watching = True
            self.back = trio.Event()
            self._nursery.start_soon(self._watch, path)

    def note_answer(self, path: str = "") -> None:
        """Record an answer of the origin to a request for `path`, which ends a run of failures."""
        if path:
            self._answered_path = path
        if not self._breaker.is_failing:
            return
        if self._breaker.answered() and self.down_since is not None:
            lasted_s = time.time() - self.down_since
            self.down_since = None
            log.warning("%s answers again, after %.0f s", self._origin.url, lasted_s)
        self.back.set()

    async def _watch(self, path: str) -> None:
        """Send probes until the run of failures has ended. Open the breaker when it is due."""
        # A server may answer all requests but those for one object, or all but the check, such as a
        # slow listing. So an object that was answered before is tried in turn with the source.
        paths = cycle(["", self._answered_path or path])
        try:
            async with trio.open_nursery() as probes:
                while self._breaker.is_failing:
                    if self.back.is_set():  # one run has ended and another began at once
                        self.back = trio.Event()
                    # A probe of a silent origin takes long, so the next one does not wait for it.
                    probes.start_soon(self._probe, next(paths))
                    with trio.move_on_after(self._random.uniform(*_INTERVAL_S)):
                        await self.back.wait()
                    if self._breaker.try_to_open(trio.current_time()):
                        self.down_since = time.time() - self._deadline_s
                        log.warning(
                            "%s does not answer; what is not cached fails at once now: %s",
                            self._origin.url,
                            self._breaker.reason,
                        )
                probes.cancel_scope.cancel()
        finally:
            self._watching = False

    async def answers(self, path: str) -> bool:
        """Whether the origin answers, whatever it says of `path` or of another object."""
        return await self._asked(path or self._answered_path)

    async def _asked(self, path: str) -> bool:
        try:
            await (self._origin.stat_unlisted(path) if path else self._origin.check())
        except OriginBusyError:
            return True
        except OriginError as error:
            return not isinstance(error, OriginUnavailableError)
        return True

    async def _probe(self, path: str) -> None:
        """Look up a path; an empty one stands for the source as a whole. Any definite or busy
        answer ends the run of failures. Only the source can open the breaker: one object may fail
        for ever."""
        answered = False
        with trio.move_on_after(self._probe_s):
            answered = await self._asked(path)
        if answered:
            self.note_answer()
        elif not path:
            self._breaker.check_failed()
