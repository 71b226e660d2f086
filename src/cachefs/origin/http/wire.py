"""Sends requests from the event loop, without a thread of Python for any of them.

`Wire.send` passes a request to the compiled engine and waits. The engine's threads send it, receive
the answer into the caller's buffer, and wake the loop once for all that has ended meanwhile.
"""

import enum
import math
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import outcome
import trio
from trio.lowlevel import Abort, RaiseCancelT
from typing_extensions import Buffer

from cachefs.origin.http._engine import Engine, Room, Transfer
from cachefs.types import Reply
from cachefs.workers import Workers

Expected = tuple[int, tuple[tuple[str, str], ...]]
"""A status, and headers (small names) with their values."""

_KEPT_S = 3
"""A connection that was idle for longer may have been closed by the server."""
_FOLLOW_S = 0.1
_PIECE_BYTES = 512 << 10
"""How much of a body is read at once. Two pieces of each are in memory."""
_WITH_OBJECT = (200, 206)
_MOST_MS = 2**31 - 1
_OTHER_NAME = 62
"""X509_V_ERR_HOSTNAME_MISMATCH."""


class End(enum.IntEnum):
    """How a transfer has ended: `enum end` in engine.h."""

    DONE = 0
    CANCELLED = enum.auto()
    TIMED_OUT = enum.auto()
    NO_ADDRESS = enum.auto()
    NO_CONNECTION = enum.auto()
    CLOSED = enum.auto()
    BROKEN = enum.auto()
    TOO_LONG = enum.auto()
    UNTRUSTED = enum.auto()
    NO_TLS = enum.auto()
    OLD_TLS = enum.auto()
    NO_CAS = enum.auto()
    FAILED = enum.auto()


class BrokenAnswerError(Exception):
    """The answer can't be understood, or it is incomplete."""


class TooLongAnswerError(BrokenAnswerError):
    """The answer has more bytes than the request allows."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a host is reached. `proxy` may contain a password. `ca_file` and `ca_path` name the CAs;
    None for both means those of the system."""

    proxy: str | None = None
    ca_file: str | None = None
    ca_path: str | None = None

    def __repr__(self) -> str:
        return f"Route(ca_file={self.ca_file!r})"


class Bounds(NamedTuple):
    """Limits of one request. `idle_s` limits the time in which no byte moves after the connection
    is there, `total_s` all of it. `most_bytes` limits a body that does not go to a sink. The first
    byte of the answer may take `patience_s` longer; then `total_s` begins anew."""

    connect_s: float
    idle_s: float
    total_s: float = math.inf
    most_bytes: int = 4 << 20
    patience_s: float = 0.0


class Fed(NamedTuple):
    """A body that a thread reads piece by piece while it is sent. `read` returns exactly as many
    bytes at an offset as it is asked for; it may block. What it raises ends the request, and
    `Wire.send` raises it. `on_sent` is called on the loop every `_FOLLOW_S` while bytes are
    sent."""

    size_bytes: int
    read: Callable[[int, int], Buffer]
    on_sent: Callable[[], None] | None = None


class Request(NamedTuple):
    """A request, signed if need be. `url` is quoted, and `headers` lack Host and Content-Length."""

    method: str
    url: str
    headers: Mapping[str, str]
    bounds: Bounds
    route: Route = Route()
    body: Buffer | Fed | None = None


class GoOn(NamedTuple):
    """The body of an answer is wanted, except its first `skip_bytes`. With `stops_when_full` the
    answer may have more bytes than the sink can hold; they are not received."""

    skip_bytes: int = 0
    stops_when_full: bool = False


class Sink(Protocol):
    """Takes the body of an object. All of it is used on the loop."""

    @property
    def room(self) -> Buffer:
        """Where the bytes go. The engine may write there until the transfer has ended, also after
        the caller was cancelled."""

    @property
    def expected(self) -> Expected | None:
        """An answer that is wanted without a look at the rest of its head."""

    def begin(self, status: int, headers: Mapping[str, str]) -> GoOn | None:
        """Decide about any other answer with status 200 or 206; None: its body is not read. Any
        exception ends the request, and `Wire.send` raises it."""

    @property
    def follow(self) -> Callable[[Callable[[], int]], Callable[[], None]] | None:
        """If not None, it is called with a function that returns how many bytes have come. What it
        returns is called every `_FOLLOW_S` while more come."""


class Answer(NamedTuple):
    """The answer to a request. `headers` have lower-case names; there are none if the answer is as
    the sink expected it. `filled_bytes` are in the sink."""

    status: int
    headers: dict[str, str]
    body: bytes
    filled_bytes: int = 0
    room: Room | None = None
    """The body, if there is no sink and the status is 200 or 206, instead of `body`."""
    md5: bytes = b""
    first_byte_s: float = 0.0
    """From when the connection was there."""
    was_kept: bool = False
    """The request was sent on a connection that had served another one."""


_TLS_REASONS = {
    End.NO_TLS: "WRONG_VERSION_NUMBER",
    End.OLD_TLS: "UNSUPPORTED_PROTOCOL",
    End.NO_CAS: "NO_CERTIFICATES",
}
"""As `ssl.SSLError.reason`; the last one is ours."""


class Wire:
    """Sends requests for one event loop, which alone may use it. It owns the threads and their
    connections. Bodies are read in at most `readers` threads of Python."""

    def __init__(self, threads: int = 1, readers: int = 1) -> None:
        # libcurl and Python would write the keys of all TLS connections to this file.
        os.environ.pop("SSLKEYLOGFILE", None)
        self._threads = threads
        self._readers = readers
        self._workers: Workers | None = None
        self._engine: Engine | None = None
        self._closed = False
        self._followed: dict[Transfer, Callable[[], None]] = {}
        self._tells_progress = False

    async def send(
        self,
        request: Request,
        sink: Sink | None = None,
        wants_md5: bool = False,
        wants_room: bool = False,
    ) -> Answer:
        """Send a request and return its answer, whatever its status. With `wants_room`, the body of
        an object is not copied: see `Answer.room`. If the caller is cancelled, the connection is
        closed; that of a write before this function returns, so that no byte of an older write is
        sent after a newer one. Raises `OSError`, `BrokenAnswerError`, `ValueError`
        for what can't be sent, and any exception of `sink`."""
        transfer = self._start(request, sink, wants_md5)
        failures: list[Exception] = []
        try:
            if isinstance(request.body, Fed):
                self._feed(transfer, request.body, failures)
            is_write = request.method not in ("GET", "HEAD")
            return await self._answer(transfer, sink, is_write, wants_room)
        except ConnectionError:
            for failure in failures:
                raise failure from None
            raise
        finally:
            self._followed.pop(transfer, None)

    def begin(
        self,
        request: Request,
        sink: Sink,
        md5: bytes | None,
        on_ended: Callable[[Transfer], None],
        reply: Reply | None = None,
        is_patient: bool = False,
    ) -> Transfer:
        """Send a request for which no task waits, and call `on_ended` on the loop when it has
        ended. Only an expected answer is received. With `md5`, the MD5 is computed. If there is a
        `reply`, it is sent before, unless the bytes have another MD5: see `Transfer.is_replied`.
        With `is_patient`, `on_ended` is called for several of them together, a little later. Raises
        `OSError`, and `ValueError` for what can't be sent."""
        transfer = self._start(request, sink, md5 is not None, md5, reply, is_patient)
        transfer.waiter = _Ending(on_ended)
        return transfer

    def reply(
        self, parts: Sequence[memoryview], reply: Reply, on_ended: Callable[[Transfer], None]
    ) -> Transfer:
        """Answer a READ of the kernel with one or two `parts`, which nobody may change, and call
        `on_ended` on the loop afterwards: see `Transfer.is_replied`. Raises `OSError`."""
        engine = self._running_engine()
        engine.reply_to(reply.device_fd)
        transfer = engine.reply(parts[0], parts[1] if len(parts) > 1 else b"", reply.unique)
        transfer.waiter = _Ending(on_ended)
        return transfer

    @property
    def workers(self) -> Workers:
        """The threads that read bodies, also for those who hash them."""
        if self._workers is None:
            self._workers = Workers(self._readers, "origin-body")
        return self._workers

    async def send_many(
        self,
        requests: Iterator[tuple[int, Request, Sink]],
        at_a_time: int,
        on_ended: Callable[[int, Transfer], None],
    ) -> None:
        """Send `requests`, each with a number, at most `at_a_time` at a time, and call `on_ended`
        with the number of each that has ended. Only expected answers are received. The next request
        is taken from `requests` when another one has ended, so that no task must run for it."""
        batch = _Batch(self, requests, on_ended)
        for _ in range(at_a_time):
            batch.start_next()
        await batch.wait()

    def _running_engine(self) -> Engine:
        if self._closed:
            raise ConnectionError("the mount is shutting down")
        if self._engine is None:
            self._engine = Engine(self._threads)
            trio.lowlevel.spawn_system_task(self._collect)
        return self._engine

    def _start(
        self,
        request: Request,
        sink: Sink | None,
        wants_md5: bool,
        told_md5: bytes | None = None,
        reply: Reply | None = None,
        is_patient: bool = False,
    ) -> Transfer:
        engine = self._running_engine()
        if reply is not None:
            engine.reply_to(reply.device_fd)
        bounds, route = request.bounds, request.route
        transfer = engine.start(
            request.method,
            request.url,
            tuple(f"{name}: {value}" for name, value in request.headers.items()),
            request.body.size_bytes if isinstance(request.body, Fed) else request.body,
            None if sink is None else sink.room,
            None if sink is None else sink.expected,
            wants_md5,
            None if reply is None else (reply.unique, reply.offset, reply.length, told_md5),
            is_patient,
            (
                bounds.most_bytes,
                _ms(bounds.connect_s),
                _ms(bounds.idle_s),
                _ms(bounds.total_s),
                round(bounds.patience_s * 1000),
            ),
            (route.proxy, route.ca_file, route.ca_path, _KEPT_S),
        )
        if sink is not None and sink.follow is not None:
            self._follow(transfer, sink.follow(lambda: transfer.filled))
        elif isinstance(request.body, Fed) and request.body.on_sent is not None:
            self._follow(transfer, request.body.on_sent)
        return transfer

    def _feed(self, transfer: Transfer, body: Fed, failures: list[Exception]) -> None:
        try:
            self.workers.begin(_feed, transfer, body, failures)
        except BaseException:  # no thread can be started
            transfer.cancel()
            raise

    async def _answer(
        self, transfer: Transfer, sink: Sink | None, waits: bool, wants_room: bool
    ) -> Answer:
        asked = False
        while True:
            await _next_event(transfer, waits)
            if transfer.is_ended:
                break
            asked = True
            assert sink is not None
            status, headers = transfer.status, parsed(transfer.head)
            try:
                decision = sink.begin(status, headers)
            except BaseException:
                transfer.cancel()
                raise
            if decision is None:
                transfer.cancel()
                return Answer(status, headers, b"")
            transfer.go_on(*decision)
        is_object = wants_room and transfer.status in _WITH_OBJECT
        room = transfer.take_room() if is_object else None
        end, detail, status, head, body, filled, first_us, was_kept, fits = transfer.result()
        if end != End.DONE:
            raise failure(End(end), detail)
        headers = {} if fits else parsed(head)
        if sink is not None and status in _WITH_OBJECT and not fits and not asked:
            sink.begin(status, headers)  # the body is empty, so the engine has not asked
        md5 = transfer.md5
        return Answer(status, headers, body, filled, room, md5, first_us / 1e6, was_kept)

    async def _collect(self) -> None:
        """Wake the tasks whose transfers have ended or are held."""
        assert self._engine is not None
        engine = self._engine
        while not self._closed:
            try:
                await trio.lowlevel.wait_readable(engine.fileno())
            except trio.ClosedResourceError:
                return
            wake(engine.collect())

    def _follow(self, transfer: Transfer, moved: Callable[[], None]) -> None:
        self._followed[transfer] = moved
        if not self._tells_progress:
            self._tells_progress = True
            trio.lowlevel.spawn_system_task(self._tell_progress)

    async def _tell_progress(self) -> None:
        seen: dict[Transfer, int] = {}
        while self._followed:
            await trio.sleep(_FOLLOW_S)
            for transfer, moved in list(self._followed.items()):
                count = transfer.filled or transfer.sent
                if count != seen.get(transfer, 0):
                    seen[transfer] = count
                    moved()
            seen = {
                transfer: count for transfer, count in seen.items() if transfer in self._followed
            }
        self._tells_progress = False

    def close(self) -> None:
        """Cancel all requests, and end the threads."""
        self._closed = True
        if self._engine is not None:
            trio.lowlevel.notify_closing(self._engine.fileno())
            wake(self._engine.close())
        if self._workers is not None:
            self._workers.stop()


def _feed(transfer: Transfer, body: Fed, failures: list[Exception]) -> None:
    """Read a body and give it to its transfer, until that has ended. Blocks."""
    offset = 0
    try:
        while offset >= 0:
            length = min(_PIECE_BYTES, body.size_bytes - offset)
            piece = body.read(offset, length)
            if memoryview(piece).nbytes != length:
                raise OSError("a body has another length than it was said to have")
            offset = transfer.give(offset, piece)
    except Exception as failure:
        failures.append(failure)
    finally:  # also if the loop has ended, through which the body is read
        transfer.cancel()


def wake(collected: list[Transfer]) -> None:
    """Let the tasks go on that wait for these transfers."""
    for transfer in collected:
        waiter, transfer.waiter = transfer.waiter, None
        if isinstance(waiter, _Ending):
            waiter.take(transfer)
        elif isinstance(waiter, _Cancelled):
            if transfer.is_ended:
                trio.lowlevel.reschedule(waiter.task, outcome.capture(waiter.raise_cancel))
            else:
                transfer.waiter = waiter
        elif waiter is not None:
            trio.lowlevel.reschedule(waiter)


class _Ending(NamedTuple):
    """What is called when a transfer has ended."""

    on_ended: Callable[[Transfer], None]

    def take(self, transfer: Transfer) -> None:
        """Take a transfer that has ended, or cancel one that is held."""
        if transfer.is_ended:
            self.on_ended(transfer)
        else:
            transfer.waiter = self
            transfer.cancel()


class _Batch:
    """Many requests of one task."""

    def __init__(
        self,
        wire: Wire,
        requests: Iterator[tuple[int, Request, Sink]],
        on_ended: Callable[[int, Transfer], None],
    ) -> None:
        self._wire = wire
        self._requests = requests
        self._on_ended = on_ended
        self._running: set[Transfer] = set()
        self._task: trio.lowlevel.Task | None = None
        self._failure: Exception | None = None

    def start_next(self) -> None:
        """Send the next request, if there is one."""
        try:
            for number, request, sink in self._requests:
                take = partial(self._take, number)
                self._running.add(self._wire.begin(request, sink, None, take, None, True))
                return
        except Exception as error:  # `wait` raises it
            self._failure = error
            self._requests = iter(())

    def _take(self, number: int, transfer: Transfer) -> None:
        self._running.remove(transfer)
        self._on_ended(number, transfer)
        self.start_next()
        if not self._running and self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Wait for all requests. If the caller is cancelled, they are, too. Raises what a request
        that could not be started has raised."""
        if self._running:
            await self._end()
        if self._failure is not None:
            raise self._failure

    async def _end(self) -> None:
        self._task = trio.lowlevel.current_task()

        def abort(_: RaiseCancelT) -> Abort:
            self._task = None
            for transfer in self._running:
                transfer.waiter = None
                transfer.cancel()
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


class _Cancelled(NamedTuple):
    """A cancelled task that waits until its connection is closed."""

    task: trio.lowlevel.Task
    raise_cancel: RaiseCancelT


async def _next_event(transfer: Transfer, waits: bool) -> None:
    """Wait until the transfer has ended or is held. If the caller is cancelled, end the transfer;
    if the caller `waits`, wait for that end, too."""
    if transfer.is_ended:
        return
    task = trio.lowlevel.current_task()
    transfer.waiter = task

    def abort(raise_cancel: RaiseCancelT) -> Abort:
        transfer.cancel()
        transfer.waiter = _Cancelled(task, raise_cancel) if waits else None
        return Abort.FAILED if waits else Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(abort)


def _ms(seconds: float) -> int:
    """Return a limit for the engine, where 0 means none."""
    return 0 if seconds == math.inf else min(_MOST_MS, max(1, round(seconds * 1000)))


def parsed(head: bytes) -> dict[str, str]:
    """Return the headers of a head by lower-case names. The last of several with one name
    counts."""
    headers: dict[str, str] = {}
    for line in head.decode("latin-1").split("\n")[1:]:
        name, separator, value = line.partition(":")
        if separator:
            headers[name.strip().lower()] = value.strip()
    return headers


def failure(end: End, detail: int) -> Exception:
    """Return the exception for a transfer without an answer. Its text has nothing of the
    request."""
    match end:
        case End.TIMED_OUT:
            return TimeoutError()
        case End.NO_ADDRESS:
            return socket.gaierror(socket.EAI_NONAME, "the host has no address")
        case End.BROKEN:
            return BrokenAnswerError()
        case End.TOO_LONG:
            return TooLongAnswerError()
        case End.UNTRUSTED:
            untrusted = ssl.SSLCertVerificationError()
            # libcurl compares the name itself, and says 1 (unspecified) before OpenSSL has ended.
            untrusted.verify_code = detail if detail > 1 else _OTHER_NAME
            untrusted.verify_message = f"error {detail}"
            return untrusted
        case End.NO_TLS | End.OLD_TLS | End.NO_CAS:
            failed = ssl.SSLError()
            failed.reason = _TLS_REASONS[end]
            return failed
        case _:
            return ConnectionError(f"{end.name.lower()} ({detail})")
