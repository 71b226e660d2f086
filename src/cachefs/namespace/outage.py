"""Whether the origin can be asked, and what may be shown for as long as it can't.

A failed request starts an *outage*. While it lasts, whoever has a stale answer is given that at
once, so that not every look-up waits for a deadline of its own; who has none asks all the same.
One task asks the origin for a sign of life about once a second. The outage ends with the first
answer to anything, but not within a second of its beginning: an origin that answers some requests
and not others would make its readers wait for each that fails.
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
"""For how long the kernel may believe a stale answer: the end of an outage is seen soon."""
_PAUSE_S = 1.0
_PROBE_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class StaleState:
    """`is_stale` while an outage lasts in which something stale has been shown, since
    `since_ns` (wall clock). `answer_count` is how often, since the start of the mount."""

    is_stale: bool
    since_ns: int | None
    answer_count: int


class Outage:
    """The present outage, if there is one. Runs on the loop thread."""

    def __init__(
        self, origin: Origin, nursery: trio.Nursery, clock: Clock, stale_if_error_s: float
    ) -> None:
        """Answers may be shown for `stale_if_error_s` beyond their TTLs, `inf` for ever; with 0
        there are no outages, and every error is handed on."""
        self._origin = origin
        self._nursery = nursery
        self._clock = clock
        self._stale_if_error_ns = stale_if_error_s * NS
        self._answered = True
        self._stale_since_ns: int | None = None
        self._answer_count = 0
        self._reason = ""
        self.is_on = False
        self.changed_at_ns = clock.now_ns()
        """When an outage last began or ended; who was here before this daemon doesn't count."""

    @property
    def state(self) -> StaleState:
        since_ns = self._stale_since_ns
        return StaleState(since_ns is not None, since_ns, self._answer_count)

    def may_show(self, remaining_ns: float) -> bool:
        """Whether an answer may be shown during an outage of whose TTL this much is left (less
        than nothing: so long ago it ended)."""
        if math.isinf(self._stale_if_error_ns):
            return True
        return remaining_ns + self._stale_if_error_ns > 0 < self._stale_if_error_ns

    def set_patience(self, stale_if_error_s: float) -> None:
        """From now on."""
        self._stale_if_error_ns = stale_if_error_s * NS

    def note_shown(self) -> None:
        """A stale answer has been given to somebody."""
        self._answer_count += 1
        if self.is_on and self._stale_since_ns is None:
            self._stale_since_ns = self._clock.now_ns()
            log.warning(
                "the origin does not answer (%s); names, attributes and listings are shown as "
                "they were last known",
                self._reason,
            )

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around each request to the origin: notes whether it was answered."""
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
        """A request has failed with this; without `stale_if_error_s` that begins nothing."""
        self._answered = False
        self._reason = str(error)
        if not self.is_on and self._stale_if_error_ns > 0:
            self.is_on = True
            self.changed_at_ns = self._clock.now_ns()
            self._nursery.start_soon(self._wait_for_end)

    async def _wait_for_end(self) -> None:
        is_over = False
        while not is_over:
            # Hundreds of nodes lose their origin at the same moment: spread their questions.
            await trio.sleep(_PAUSE_S * random.uniform(1.0, 1.5))
            is_over = self._answered or await self._probe()
        self.is_on = False
        self.changed_at_ns = self._clock.now_ns()
        if self._stale_since_ns is not None:
            lasted_s = max(0, self._clock.now_ns() - self._stale_since_ns) / NS
            log.info(
                "the origin answers again; stale answers were shown for %s",
                format_duration(lasted_s),
            )
            self._stale_since_ns = None

    async def _probe(self) -> bool:
        """Whether the origin has answered, this or something else meanwhile."""
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
