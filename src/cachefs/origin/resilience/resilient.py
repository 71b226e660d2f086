"""`ResilientOrigin`: adds deadlines, retries, limits and a circuit breaker to any origin.

**Deadlines.** A call fails after `Resilience.deadline_s`. A single request times out sooner, so
that there is time for a retry. A large body may take longer, in proportion to the recent speed of
other bodies, and for as long as bytes arrive: both deadlines restart when bytes arrive, and a retry
requests only the missing bytes. Time in a queue (for a slot, or until a Retry-After ends) counts
only while the origin answers no request, so that load on a working origin does not cause errors
(after `_BUSY_PATIENCE_S` of 429 and 503 a Retry-After counts again). Waits for the bandwidth limit
never count, nor does time in which this process did not run (`loop_clock.py`): each call that
waited gets one more try after that. The methods that wait (`_take_slot`, `_back_off`, `_wait`)
return the deadline after the wait: the time of the origin's last answer plus the time that was left
when the wait began (`_put_off`).

**Retries.** Every failure that may be temporary is retried, with full jitter. Definite answers
(absent, denied, changed, refused) and refused certificates are passed on at once.

**Overload.** 429 and 503 answers, requests that time out while the origin answers others (but none
of the later ones quickly), and very slow bodies lower the number of requests in flight
(`limiter.py`).

**Outage.** The breaker opens only if the check of the source fails too: one object that can't be
read is no outage. While it is open, new calls fail at once. Calls that are already in flight wait
for the origin until their deadline. Probes detect when the origin answers again.
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import outcome
import trio

from cachefs.errors import (
    BadDataError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    UntrustedOriginError,
)
from cachefs.log import warn_once
from cachefs.loop_clock import had_gap_since
from cachefs.origin.base import Origin
from cachefs.origin.names import Pages, next_page
from cachefs.origin.options import CHECK_DEADLINE_S, LISTING_PATIENCE_S, QUICK_READ_S
from cachefs.origin.resilience.bandwidth import Bandwidth
from cachefs.origin.resilience.hedge import hedged
from cachefs.origin.resilience.limiter import AdaptiveLimit, RequestSlots
from cachefs.origin.resilience.pace import Pace
from cachefs.origin.resilience.prober import Prober
from cachefs.origin.resilience.reading import Listing, Reading, Transfer
from cachefs.origin.resilience.settings import OriginState, Resilience
from cachefs.origin.resilience.writing import ResilientWriter
from cachefs.origin.wrapping import WrappingOrigin
from cachefs.types import READER_TURN, Buffer, Entry, Found, ObjectMeta, Reply, Turn

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_DELAY_S = 0.05
_MOST_DELAY_S = 1.0
_CHECK_S = CHECK_DEADLINE_S + 0.5
_LEAST_CHECK_S = 1.0
_BUSY_PATIENCE_S = 30.0
"""How long a call goes on that gets only 429 and 503, while the origin answers others. An overload
ends in that time, or fewer requests end it; else it is this object that fails."""
_WHOLE_LISTING_S = 120.0
"""For origins that return a whole directory in one answer, however large it is."""


class _HastyError(OriginUnavailableError):
    """A request got no answer, but it had less time than others."""


class ResilientOrigin(WrappingOrigin):
    """Wraps `inner` and owns it. The breaker can open only while `run` is running."""

    def __init__(
        self, inner: Origin, settings: Resilience, rng: random.Random | None = None
    ) -> None:
        super().__init__(inner)
        self._settings = settings
        self._random = rng or random.Random()
        self._slots = RequestSlots(AdaptiveLimit(settings.max_downloads))
        self._bandwidth = Bandwidth(settings.download_limit, self._note_held_back)
        self._pace = Pace()
        self._note_best_size()
        self._prober = Prober(inner, settings, self._random)
        self._answered_at = float("-inf")
        self._quick_from = float("-inf")
        """When the latest request began that was answered quickly."""
        self._retries = self._busy_answers = self._failed_calls = self._hedges = 0
        self._writer: ResilientWriter | None = None
        if inner.writer is not None:
            call = partial(self._call, deadline_s=settings.write_timeout_s)
            self._writer = ResilientWriter(inner.writer, settings, call, self.read)

    # -- settings and state --------------------------------------------------------------------

    @property
    def is_down(self) -> bool:
        """Whether the breaker is open, so that new calls fail at once."""
        return self._prober.is_down

    @property
    def queued(self) -> int:
        """Number of requests that wait for a slot."""
        return self._slots.queued

    @property
    def unhindered_s(self) -> float | None:
        """Seconds that a small read takes without contention; None until measured."""
        return self._pace.unhindered_s

    @property
    def max_downloads(self) -> int:
        return self._slots.limit.most

    @max_downloads.setter
    def max_downloads(self, most: int) -> None:
        self._slots.limit.most = most
        self._slots.grant()

    @property
    def download_limit(self) -> float | None:
        """The bandwidth limit in bytes per second; None means no limit."""
        return self._bandwidth.bytes_per_s

    @download_limit.setter
    def download_limit(self, bytes_per_s: float | None) -> None:
        self._bandwidth.set_rate(bytes_per_s)
        self._note_best_size()

    @property
    def hedge(self) -> bool:
        """Whether a second request is sent when a read is late."""
        return self._settings.hedge

    @hedge.setter
    def hedge(self, hedge: bool) -> None:
        self._settings = replace(self._settings, hedge=hedge)

    def state(self) -> OriginState:
        """Return the state and the statistics that `status` shows."""
        return {
            "down_since": self._prober.down_since,
            "problem": self._prober.problem if self.is_down else None,
            "limit": self._slots.limit.now,
            "in_flight": self._slots.in_flight,
            "queued": self._slots.queued,
            "retries": self._retries,
            "busy_answers": self._busy_answers,
            "failed_calls": self._failed_calls,
            "hedges": self._hedges,
        }

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send probes when they are needed. Runs until it is cancelled."""
        await self._prober.run(task_status)

    @property
    def writer(self) -> ResilientWriter | None:
        """See `Origin.writer`: the writer of the inner origin, with deadlines and retries."""
        return self._writer

    # -- Origin --------------------------------------------------------------------------------

    async def check(self) -> None:
        """Run `Origin.check`; retry it once if there is time."""
        began_at = trio.current_time()
        check = partial(self._call, "", self._inner.check, once=True)
        try:
            await check(request_s=_CHECK_S)
        except UntrustedOriginError:
            raise
        except OriginUnavailableError:
            left_s = began_at + _CHECK_S - trio.current_time() - _MOST_DELAY_S / 4
            if left_s < _LEAST_CHECK_S:
                raise
            await trio.sleep(_MOST_DELAY_S / 4)
            await check(request_s=left_s)

    async def stat(self, path: str) -> Found:
        """See `Origin.stat`."""
        ask = partial(self._timed, self._inner.stat, path)
        return await self._look_up(path, ask, ask)

    async def stat_and_read(self, path: str) -> tuple[Found, Buffer | None]:
        """See `Origin.stat_and_read`. With a bandwidth limit, return metadata only, so that no
        bytes are fetched that no reader needs."""
        if self._bandwidth.bytes_per_s:
            return await self.stat(path), None
        ask = partial(self._timed, self._inner.stat_and_read, path)
        return await self._look_up(path, ask, partial(self._stat_only, path))

    async def _stat_only(self, path: str) -> tuple[Found, Buffer | None]:
        return await self._timed(self._inner.stat, path), None

    async def _look_up(
        self, path: str, ask: Callable[[], Awaitable[T]], again: Callable[[], Awaitable[T]]
    ) -> T:
        """Look up a path. That may need a LIST, which may be slow: so further tries (`again`) have
        more time, as long as an object of that path can be asked for."""
        listing: Listing | None = None
        turn = Transfer()

        async def attempt() -> T:
            nonlocal listing
            if listing is None:
                listing = Listing(trio.current_time() + LISTING_PATIENCE_S)
                return await ask()
            listing.scope = turn.scope
            try:
                return await self._ask_patiently(path, again, listing, own_only=True)
            finally:
                turn.moved_at = listing.moved_at

        return await self._call(path, attempt, reading=turn)

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """See `Origin.list_dir`. Each page has its own deadline."""
        pages = aiter(self._inner.list_dir(path, below))
        ask = partial(next_page, pages)
        if self._inner.lists_in_one_piece:
            return Pages(partial(self._call, path, ask, request_s=_WHOLE_LISTING_S))
        return Pages(partial(self._list_page, path, ask))

    async def _list_page(
        self, path: str, ask: Callable[[], Awaitable[list[Entry] | None]]
    ) -> list[Entry] | None:
        """Return the next page. A store may work on a page for long, because of many deleted names
        or slow disks. So it has more time, as long as the origin answers other requests."""
        listing = Listing(trio.current_time() + LISTING_PATIENCE_S)
        attempt = partial(self._ask_patiently, path, ask, listing)
        return await self._call(path, attempt, reading=listing)

    async def _ask_patiently(
        self,
        path: str,
        ask: Callable[[], Awaitable[T]],
        listing: Listing,
        own_only: bool = False,
    ) -> T:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_listing, path, listing, own_only)
            found = await outcome.acapture(ask)
            nursery.cancel_scope.cancel()
        return found.unwrap()

    async def _wait_for_listing(self, path: str, listing: Listing, own_only: bool) -> None:
        """Postpone the timeout of a listing while the origin answers other requests; with
        `own_only`, only those for an object of that path. If there are none, send one."""
        interval_s = self._settings.request_timeout_s / 2
        began_at = trio.current_time()
        while (asked_at := trio.current_time()) + interval_s < listing.patient_until:
            await trio.sleep(interval_s)
            is_answered = self._answered_at >= asked_at and not own_only
            if not is_answered:
                with trio.move_on_after(interval_s):
                    is_answered = await self._prober.answers(path)
            now = trio.current_time()
            if not is_answered or listing.scope is None:
                continue
            self._note_answer()
            self._slots.grant()  # the limit may have risen, and the listing may go on for long
            listing.moved_at = now
            listing.scope.deadline = max(listing.scope.deadline, now + 2 * interval_s)
            if now - began_at >= 2 * interval_s:
                warn_once(
                    log,
                    self.url,
                    "%s: the listing takes longer than --request-timeout, while other requests are "
                    "answered; cachefs waits for up to %.0f s for each page",
                    self._subject(path),
                    LISTING_PATIENCE_S,
                )

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`. Waits first as long as the bandwidth limit requires."""
        return await self.read_in_turn(READER_TURN, path, meta, offset, length)

    async def read_in_turn(
        self, turn: Turn, path: str, meta: ObjectMeta, offset: int, length: int
    ) -> Buffer:
        """See `Origin.read_in_turn`."""
        if turn.began_at is None:
            self._refuse_if_down()
        if self._bandwidth.bytes_per_s:
            await self._bandwidth.take(length, turn)
        reading = Reading(length, length == meta.size_bytes, self._note_progress, turn)
        attempt = partial(self._read_once, path, meta, offset, reading)
        extra_s = self._pace.allowance_s(length)
        return await self._call(path, attempt, extra_s, reading=reading, began_at=turn.began_at)

    def begin_read(
        self,
        path: str,
        meta: ObjectMeta,
        on_read: Callable[[memoryview | None], None],
        reply: Reply | None = None,
    ) -> bool:
        """See `Origin.begin_read`. Only where nothing must be waited for: not with a bandwidth
        limit, an open breaker, or a queue, and only while the store answers quickly: otherwise
        many of these reads would have to be sent again. It neither retries nor records a
        failure."""
        size_bytes = meta.size_bytes
        if self.is_down or self._settings.hedge or self._bandwidth.bytes_per_s:
            return False
        if self._settings.deadline_s < QUICK_READ_S + self._settings.request_timeout_s:
            return False  # there would be no time for another try
        if not self._pace.answers_quickly or not self._pace.is_quick(size_bytes):
            return False
        if not self._slots.try_take():
            return False
        began_at = trio.current_time()

        def take(data: memoryview | None) -> None:
            if data is not None:
                self._note_answer(path)
                self._note_read(size_bytes, began_at)
            self._slots.release()
            on_read(data)

        has_begun = False
        try:
            has_begun = self._inner.begin_read(path, meta, take, reply)
        finally:
            if not has_begun:
                self._slots.release()
        return has_begun

    async def read_many(
        self,
        wanted: Sequence[tuple[str, ObjectMeta]],
        at_a_time: int,
        stopped: Callable[[], bool],
        turn: Turn = READER_TURN,
    ) -> list[memoryview | None]:
        """See `Origin.read_many`. Sends at most as many requests at a time as slots are free. It
        neither retries nor records a failure, because the caller reads missing objects with
        `read`. Raises `OriginUnavailableError` if no slot becomes free in time."""
        self._refuse_if_down()
        size_bytes = sum(meta.size_bytes for _, meta in wanted)
        await self._bandwidth.take(size_bytes, turn)
        self._refuse_if_down()
        extra_s = self._pace.allowance_s(size_bytes)
        if not self._slots.try_take():
            deadline = trio.current_time() + self._settings.deadline_s + extra_s
            await self._take_slot(wanted[0][0], deadline, None, turn)
        slots = 1
        found: list[memoryview | None] = [None] * len(wanted)
        try:
            while slots < min(at_a_time, len(wanted)) and self._slots.try_take():
                slots += 1
            # If one request gets no answer, there is still time to take the other answers.
            with trio.move_on_after(2 * self._settings.request_timeout_s + extra_s):
                found = await self._inner.read_many(wanted, slots, stopped)
            if self._inner.quickest_s:
                self._note_quick(self._inner.quickest_s)
            for _ in filter(None, found):
                self._note_answer()
        finally:
            for _ in range(slots):
                self._slots.release()
        self._bandwidth.give_back(size_bytes - sum(map(len, filter(None, found))))
        return found

    def reorder(self) -> None:
        """See `Origin.reorder`."""
        self._bandwidth.reorder()
        self._slots.reorder()

    # -- one call ------------------------------------------------------------------------------

    async def _call(
        self,
        path: str,
        attempt: Callable[[], Awaitable[T]],
        extra_s: float = 0.0,
        request_s: float | None = None,
        once: bool = False,
        reading: Transfer | None = None,
        deadline_s: float | None = None,
        began_at: float | None = None,
    ) -> T:
        """Call `attempt` until it succeeds or the deadline passes. Raises `OriginError`.

        `extra_s` is additional time for the body. `request_s` replaces the timeout of each
        request, and `deadline_s` that of the call; no request starts after the deadline. `once`: do
        not retry. `began_at`: when an earlier try began; the deadline counts from then on.
        """
        if reading is None or not reading.outlasts_outages:
            self._refuse_if_down()
        deadline_s = deadline_s or self._settings.deadline_s
        began_at = trio.current_time() if began_at is None else began_at
        deadline = began_at + deadline_s + extra_s
        tries = 0
        patient_until: float | None = None
        failure: OriginError | None = self._outage()
        try:
            while True:
                if self.is_down or not self._slots.try_take():
                    turn = reading.turn if reading else READER_TURN
                    deadline = await self._take_slot(path, deadline, failure, turn)
                now = trio.current_time()
                if failure is not None and now >= deadline:  # on a busy machine a pause is longer
                    self._slots.release()
                    raise failure
                try:
                    timeout_s = request_s or self._request_s(deadline - now, extra_s)
                    return await self._try(path, attempt, now, timeout_s, reading)
                except (OriginUnavailableError, BadDataError) as error:
                    # An earlier failure tells more than a last try that had too little time.
                    if failure is None or not isinstance(error, _HastyError):
                        failure = error
                if reading is not None:
                    deadline = reading.postponed(deadline, now, deadline_s)
                tries += 1
                if once or isinstance(failure, UntrustedOriginError):
                    raise failure
                if had_gap_since(now):  # nobody could answer then
                    again_at = trio.current_time() + _MOST_DELAY_S
                    deadline = max(deadline, again_at + self._settings.request_timeout_s)
                if patient_until is None and isinstance(failure, OriginBusyError):
                    patient_until = now + _BUSY_PATIENCE_S
                deadline = await self._back_off(tries, failure, deadline, patient_until or now)
                self._retries += 1
                log.debug("%r: tried again, as %s", path, failure)
        except BadDataError as error:
            self._failed_calls += 1
            raise OriginUnavailableError(f"{error}, each time it was asked") from error
        except OriginUnavailableError:
            self._failed_calls += 1
            raise

    def _request_s(self, left_s: float, extra_s: float) -> float:
        """Return the timeout of one request. If the time left after it is too short for another
        request, this request gets all of it."""
        full_s = self._settings.request_timeout_s + extra_s
        return full_s if left_s >= full_s + self._settings.request_timeout_s else left_s

    async def _try(
        self,
        path: str,
        attempt: Callable[[], Awaitable[T]],
        began_at: float,
        timeout_s: float,
        reading: Transfer | None = None,
    ) -> T:
        """Send one request and record its outcome. The caller has taken a slot; this method
        releases it."""
        try:
            with trio.move_on_at(began_at + timeout_s) as scope:
                if reading is not None:
                    reading.scope = scope
                result = await attempt()
                self._note_answer(path)
                if trio.current_time() < began_at + self._settings.request_timeout_s / 4:
                    self._quick_from = max(self._quick_from, began_at)
                return result
            self.counters.errors += 1
            has_moved = reading is not None and reading.moved_at >= began_at
            # An overloaded origin answers later requests no sooner: else it is this object.
            if self._answered_at > began_at and (has_moved or self._quick_from <= began_at):
                self._note_refusal(began_at)
            if isinstance(reading, Reading):
                self._pace.note_silence()
                self._note_best_size()
            silent_s = max(timeout_s, 0.0)
            if isinstance(reading, Reading) and reading.moved_at >= began_at:
                silent_s = min(silent_s, self._settings.request_timeout_s)
            verb = "read" if reading is None else reading.verb
            is_hasty = timeout_s < self._settings.request_timeout_s
            raise (_HastyError if is_hasty else OriginUnavailableError)(
                f"{self._subject(path)} can't be {verb}: no answer within {silent_s:.1f} s"
            )
        except OriginBusyError:
            self._busy_answers += 1
            self._note_refusal(began_at)
            raise
        except OriginUnavailableError as error:
            self._prober.note_failure(began_at, str(error), path)
            raise
        except OriginError:  # of this object, by an origin that works
            self._note_answer()
            raise
        finally:
            self._slots.release()

    async def _timed(self, request: Callable[[str], Awaitable[T]], path: str) -> T:
        """Send one request for metadata and record how long it took."""
        began_at = trio.current_time()
        found = await request(path)
        if path:  # the root may cost no request
            self._note_quick(trio.current_time() - began_at)
        return found

    def _note_quick(self, took_s: float) -> None:
        """Record how long one request took."""
        if took_s < self.quickest_s or not self.quickest_s:
            self.quickest_s = took_s

    def _note_answer(self, path: str = "") -> None:
        self._answered_at = trio.current_time()
        self._slots.limit.served(self._slots.in_flight)
        self._prober.note_answer(path)

    def _note_refusal(self, began_at: float) -> None:
        self._slots.limit.refused(began_at, trio.current_time(), self._slots.in_flight)

    async def _take_slot(
        self, path: str, deadline: float, failure: OriginError | None, turn: Turn
    ) -> float:
        """Wait while the breaker is open, then for a slot. Return the deadline, postponed by the
        time that does not count. If the deadline passes, raise `failure`, or an error about the
        queue if `failure` is None."""
        if self.is_down:
            assert failure is not None
            deadline = await self._wait(self._prober.back, deadline, failure)
        if self._slots.try_take():
            return deadline
        if failure is None:
            failure = OriginUnavailableError(
                f"{self._subject(path)} can't be read: the origin answered none of the requests "
                "before it in time"
            )
        granted = self._slots.ask(turn)
        try:
            return await self._wait(granted, deadline, failure)
        except BaseException:
            self._slots.withdraw(granted)
            raise

    async def _back_off(
        self, tries: int, failure: OriginError, deadline: float, patient_until: float
    ) -> float:
        """Sleep before the next try. Return the deadline, postponed by the time that does not
        count, but not beyond `patient_until`. Raise `failure` if there is no time for another
        try."""
        longest_s = min(_MOST_DELAY_S, _FIRST_DELAY_S * 2 ** (tries - 1))
        delay_s = self._random.uniform(0, longest_s)
        began_at = trio.current_time()
        if not isinstance(failure, OriginBusyError):
            if began_at + delay_s >= deadline:
                raise failure
            await trio.sleep(delay_s)
            return deadline
        until = began_at + delay_s + (failure.retry_after_s or 0.0)
        left_s = deadline - began_at
        while (now := trio.current_time()) < until:
            if now >= deadline:
                raise failure
            await trio.sleep_until(min(until, deadline))
            deadline = max(deadline, min(self._put_off(began_at, left_s), patient_until))
        return deadline

    async def _wait(self, event: trio.Event, deadline: float, failure: OriginError) -> float:
        """Wait for `event`. Return the postponed deadline; raise `failure` when it passes."""
        began_at = trio.current_time()
        left_s = deadline - began_at
        while not event.is_set():
            with trio.move_on_at(deadline):
                await event.wait()
            deadline = self._put_off(began_at, left_s)
            if trio.current_time() >= deadline and not event.is_set():
                raise failure
        return deadline

    def _put_off(self, began_at: float, left_s: float) -> float:
        """Return the deadline of a call that had `left_s` when it began to wait at `began_at`.

        A wait costs only the time since the origin's last answer."""
        return max(began_at, self._answered_at) + left_s

    def _note_held_back(self) -> None:
        self.held_back_at = trio.current_time()

    def _note_best_size(self) -> None:
        self.best_read_bytes = min(self._pace.best_read_bytes, self._bandwidth.best_read_bytes)

    async def _read_once(
        self, path: str, meta: ObjectMeta, offset: int, reading: Reading
    ) -> Buffer:
        """Read the missing bytes in one request, or in smaller ones after one was too large."""
        while reading.next_bytes < reading.left_bytes:
            reading.keep(await self._read_part(path, meta, offset, reading))
            self._note_progress(reading)
        if not reading.left_bytes:
            return reading.joined(b"")
        return reading.joined(await self._read_part(path, meta, offset, reading))

    async def _read_part(
        self, path: str, meta: ObjectMeta, offset: int, reading: Reading
    ) -> Buffer:
        """Send one request, perhaps hedged, and record how long it took."""
        began_at = trio.current_time()
        at, length = offset + reading.kept_bytes, reading.next_bytes
        read = partial(self._inner.read, path, meta, at, length)
        straggler_s = self._pace.straggler_s(length) if self._settings.hedge else None
        body = None if self._pace.is_quick(length) else reading.new_body()
        try:
            if straggler_s is not None:
                data = await hedged(read, straggler_s, self._slots, self._count_hedge)
            elif body is None:
                data = await read()
            else:
                data = await self._inner.read_body(path, meta, at, length, body)
        except (OriginUnavailableError, trio.Cancelled) as error:
            come = body.take() if body is not None else b""
            reading.keep(come)
            if isinstance(error, trio.Cancelled) and not come:
                reading.ask_for_less()
            raise
        self._note_read(length, began_at)
        return data

    def _note_read(self, length: int, began_at: float) -> None:
        took_s = trio.current_time() - began_at
        self._note_quick(took_s)
        self._pace.note(length, took_s)
        self._note_best_size()
        if self._pace.is_slow(length, took_s):
            self._note_refusal(began_at)

    def _note_progress(self, reading: Reading) -> None:
        """Record that bytes of a slow body have arrived: this postpones the request's timeout and
        counts as an answer of the origin."""
        now = trio.current_time()
        self.progressed_at = reading.moved_at = self._answered_at = now
        if reading.scope is not None:
            until = now + self._settings.request_timeout_s
            reading.scope.deadline = max(reading.scope.deadline, until)
        self._prober.note_answer()

    def _count_hedge(self) -> None:
        self._hedges += 1

    def _refuse_if_down(self) -> None:
        if (failure := self._outage()) is not None:
            self._failed_calls += 1
            raise failure

    def _outage(self) -> OriginUnavailableError | None:
        """Return the error of a call while the breaker is open, None while it is closed."""
        if self._prober.down_since is None:
            return None
        since = time.strftime("%H:%M:%S", time.localtime(self._prober.down_since))
        problem = f"{self.url} does not answer (since {since}): {self._prober.problem}"
        return OriginUnavailableError(problem)
