"""Whether the origin is reachable, and which stale answers may be shown while it isn't.

A failed request starts an *outage*. During an outage a request with a stale answer gets that at
once, so that it doesn't wait for its own deadline. A request without one still goes to the origin.
One task probes the origin about once a second. The outage ends with the first answer to any
request, but lasts at least a second: otherwise, with an origin that answers only some requests,
readers would wait for each request that fails.
"""

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from cachefs.errors import CachefsError, OriginUnavailableError
from cachefs.namespace.clock import Clock
from cachefs.origin.base import Origin
from cachefs.units import format_duration

log = logging.getLogger(__name__)

NS = 1_000_000_000
STALE_TTL_S = 1.0
"""How long the kernel may cache a stale answer. It is short, so that readers notice the end of an
outage soon."""
_PAUSE_S = 1.0
_PROBE_DEADLINE_S = 10.0
_MOST_WAIT_S = 10.0
_NUMBERS = 99_991
"""A prime, so that daemons that start at regular intervals begin with different numbers."""


@dataclass(frozen=True, slots=True)
class StaleState:
    """`is_stale`: an outage lasts, and stale answers were given, the first at `since_ns` (wall
    clock). `answer_count` is the number of stale answers since the start of the mount."""

    is_stale: bool
    since_ns: int | None
    answer_count: int


class Outage:
    """The present outage, if there is one. One mount has one `Outage`, on the loop thread."""

    def __init__(
        self, origin: Origin, nursery: trio.Nursery, clock: Clock, stale_if_error_s: float
    ) -> None:
        """Answers may be shown for `stale_if_error_s` after their TTL; `inf` means for ever. With
        0 there are no outages, and readers get every error."""
        self._origin = origin
        self._nursery = nursery
        self._clock = clock
        self._stale_if_error_ns = stale_if_error_s * NS
        self._answered = True
        self._stale_since_ns: int | None = None
        self._answer_count = 0
        self.reason = ""
        """The text of the last error of a request without an answer."""
        self.is_on = False
        self.changed_at_ns = clock.now_ns()
        """When an outage last began or ended; at first, when this daemon started."""
        self.change_number = self.changed_at_ns // 1_000_000 % _NUMBERS
        """Grows by one when an outage begins or ends, and is hardly that of a daemon before."""

    @property
    def state(self) -> StaleState:
        """Whether stale answers are being given: for statistics."""
        since_ns = self._stale_since_ns
        return StaleState(since_ns is not None, since_ns, self._answer_count)

    def may_show(self, remaining_ns: float) -> bool:
        """Return whether an answer may be shown during an outage. `remaining_ns` is the time until
        its TTL expires; negative if it has expired."""
        if math.isinf(self._stale_if_error_ns):
            return True
        return remaining_ns + self._stale_if_error_ns > 0 < self._stale_if_error_ns

    def set_stale_if_error(self, stale_if_error_s: float) -> None:
        """Change for how many seconds after their TTL answers may be shown."""
        self._stale_if_error_ns = stale_if_error_s * NS

    def note_shown(self) -> None:
        """Count a stale answer. The first one in an outage is logged."""
        self._answer_count += 1
        if self.is_on and self._stale_since_ns is None:
            self._stale_since_ns = self._clock.now_ns()
            log.warning(
                "the origin does not answer (%s); names, attributes and listings are shown as "
                "they were last known",
                self.reason,
            )

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Enclose each request to the origin: notes whether it was answered."""
        try:
            yield
        except OriginUnavailableError as error:
            self.begin(error)
            raise
        except CachefsError:
            self._answered = True
            raise
        self._answered = True

    def begin(self, error: OriginUnavailableError) -> None:
        """Note that a request has failed with `error`. This begins an outage, except with a
        `stale_if_error_s` of 0."""
        self._answered = False
        self.reason = str(error)
        if not self.is_on and self._stale_if_error_ns > 0:
            self._note_change(is_on=True)
            self._nursery.start_soon(self._wait_for_end)

    def _note_change(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.changed_at_ns = self._clock.now_ns()
        self.change_number += 1

    async def wait(self, pause_s: float) -> None:
        """Wait before a request is repeated: for `pause_s`, then until the outage ends, at most
        `_MOST_WAIT_S`. A request during an outage may get an error without being sent."""
        await trio.sleep(pause_s)
        with trio.move_on_after(_MOST_WAIT_S):
            while self.is_on:  # noqa: ASYNC110 - outages have no event
                await trio.sleep(pause_s)

    async def _wait_for_end(self) -> None:
        is_over = False
        while not is_over:
            # Hundreds of nodes may lose their origin at the same moment: spread their probes.
            await trio.sleep(_PAUSE_S * random.uniform(1.0, 1.5))
            is_over = self._answered or await self._probe()
        self._note_change(is_on=False)
        if self._stale_since_ns is not None:
            lasted_s = max(0, self._clock.now_ns() - self._stale_since_ns) / NS
            log.info(
                "the origin answers again; stale answers were shown for %s",
                format_duration(lasted_s),
            )
            self._stale_since_ns = None

    async def _probe(self) -> bool:
        """Probe the origin. Return whether it has answered this or, meanwhile, another request."""
        try:
            with trio.fail_after(_PROBE_DEADLINE_S):
                await self._origin.check()
        except (OriginUnavailableError, trio.TooSlowError):
            return self._answered
        except CachefsError:
            return True
        except Exception:
            log.exception("bug while probing the origin")
            return True
        return True
