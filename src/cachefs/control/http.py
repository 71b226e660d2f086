"""HTTP/1.1 on a listening socket: hypercorn's trio worker, with limits on each client's cost.

This doesn't use hypercorn's `serve`, because that would wait for ever, even when cancelled, for a
client that doesn't read. No request is logged, and no signal handler is installed.

Whatever a connection or a request raises ends only that connection. The first failure of each kind
is logged, as clients can cause any number of them.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cachefs.mounts.peer import is_trusted, uid_of_peer

SEND_TIMEOUT_S = 5.0
"""A client that doesn't read for this long is dropped. `cachefs metadata export` reads only after
writing what it has received, which takes some time on a busy machine."""

_SEND_BYTES = 64 << 10
"""Bytes sent at a time. The timeout is per piece, so that a client which reads slowly isn't
dropped."""

HEAD_TIMEOUT_S = 5.0
"""A client that hasn't sent the head of its (next) request within this time is dropped."""

MAX_BODY_BYTES = 1 << 20
"""The longest body of a request that is kept; the rest is discarded."""

MAX_CONNECTIONS = 128

_logger = logging.getLogger(__name__)


async def serve_http(
    app: ASGIApp,
    listener: trio.SocketListener,
    *,
    makes_room: bool = False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer with `app` until cancelled. `listener` is closed at the end.

    When there are `MAX_CONNECTIONS`, a new connection is refused. With `makes_room`, the server
    closes the least recently used one (by its last request, or its start) and cancels its answer.
    """
    config = Config()
    config.accesslog = None
    config.errorlog = _logger
    config.include_server_header = False
    config.keep_alive_timeout = HEAD_TIMEOUT_S
    context = WorkerContext(None)
    open_ones: OrderedDict[trio.SocketStream, None] = OrderedDict()
    failures = _Failures()

    async def answer(stream: trio.SocketStream) -> None:
        try:
            if _is_trusted(stream.socket):
                await talk(stream)
            else:
                await stream.aclose()
        except* _RefusedError:
            pass
        except* Exception as error:  # cancellation passes
            failures.note(logging.INFO, "a connection was dropped", error)

    async def talk(stream: trio.SocketStream) -> None:
        if len(open_ones) >= MAX_CONNECTIONS:
            if not makes_room:
                await stream.aclose()
                return
            open_ones.popitem(last=False)[0].socket.close()
        open_ones[stream] = None

        def note_request() -> None:
            if stream in open_ones:
                open_ones.move_to_end(stream)

        bounded: Any = _Bounded(app, failures, note_request, ends_with_client=makes_room)
        try:
            impatient: Any = _ImpatientStream(stream)
            wrapped = ASGIWrapper(bounded)
            await _Connection(wrapped, config, context, ConnectionState({}), impatient)
        finally:
            open_ones.pop(stream, None)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, answer, [listener])
        task_status.started()


def _is_trusted(sock: trio.socket.SocketType) -> bool:
    """Whether the client may be answered: on a Unix socket only root and our own user may."""
    if sock.family != trio.socket.AF_UNIX:
        return True
    return is_trusted(uid_of_peer(sock))


class _Failures:
    """Logs the first failure of each kind: of each type, from each line of code."""

    def __init__(self) -> None:
        self._known: set[tuple[object, ...]] = set()

    def note(self, level: int, what: str, error: BaseException) -> None:
        """Log `what` failed with `error`, with a traceback if `level` is that of an error."""
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                self.note(level, what, part)
            return
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        place = innermost and (innermost.tb_frame.f_code.co_filename, innermost.tb_lineno)
        kind = (type(error), place)
        if kind in self._known:
            return
        self._known.add(kind)
        text = f"{type(error).__name__}: {str(error)[:200]!r}"
        trace = error if level >= logging.ERROR else None
        _logger.log(level, "%s: %s; it is logged only once", what, text, exc_info=trace)


class _RefusedError(Exception):
    """The request was refused, and its connection can't be used any more."""


class _Http11(H11Protocol):
    """HTTP/1.1 and nothing else: no HTTP/2, no WebSocket, no tunnels. A wish to change the protocol
    (`Upgrade`) is ignored, as HTTP allows."""

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.method == b"CONNECT" or event.http_version not in {b"1.0", b"1.1"}:
            await self._send_error_response(501)
            raise _RefusedError(event.method.decode("ascii", "replace"))

    async def _create_stream(self, request: h11.Request) -> None:
        headers = list(request.headers)
        kept = [(name, value) for name, value in headers if name != b"upgrade"]
        if len(kept) < len(headers):
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=kept,
                http_version=request.http_version,
            )
        await super()._create_stream(request)


class _Connection(TCPServer):
    async def _read_data(self) -> None:
        wrapper = self.protocol  # which would change to HTTP/2
        wrapper.protocol = _Http11(
            self.app,
            self.config,
            self.context,
            self._task_group,
            wrapper.state,
            wrapper.ssl,
            wrapper.client,
            wrapper.server,
            self.protocol_send,
        )
        await super()._read_data()
        # The client has disconnected. Without this the connection stays open until its idle time
        # ends.
        await self.idle_task.stop()


class _ImpatientStream(trio.abc.HalfCloseableStream):
    """Drops a peer that doesn't read. Cancelling can't do that, as hypercorn shields its sends."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data)
        while left:
            with trio.move_on_after(SEND_TIMEOUT_S) as scope:
                try:
                    await self._stream.send_all(left[:_SEND_BYTES])
                except trio.BusyResourceError as error:  # hypercorn only closes while it sends
                    raise trio.BrokenResourceError("the connection is being closed") from error
            if scope.cancelled_caught:
                await self._stream.aclose()
                raise trio.BrokenResourceError("the peer does not read")
            left = left[_SEND_BYTES:]

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Bounded:
    """Receives from the client while the app runs, so that hypercorn notices a disconnect. It keeps
    at most `MAX_BODY_BYTES` and one piece of the body."""

    def __init__(
        self,
        app: ASGIApp,
        failures: _Failures,
        on_request: Callable[[], None],
        ends_with_client: bool,
    ) -> None:
        self._app = app
        self._failures = failures
        self._on_request = on_request
        self._ends_with_client = ends_with_client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self._on_request()
        try:
            await self._answer(scope, receive, send)
        except* ClientDisconnect:
            pass
        except* Exception as error:  # hypercorn would log each one
            self._failures.note(logging.ERROR, "a request could not be answered", error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        into, out = trio.open_memory_channel[Message](math.inf)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_in, receive, into, nursery.cancel_scope)
            await self._app(scope, out.receive, partial(_send, send))
            nursery.cancel_scope.cancel()

    async def _take_in(
        self, receive: Receive, into: trio.MemorySendChannel[Message], answering: trio.CancelScope
    ) -> None:
        size_bytes = 0
        while True:
            message = await receive()
            if size_bytes <= MAX_BODY_BYTES or message["type"] == "http.disconnect":
                into.send_nowait(message)
            if message["type"] == "http.disconnect":
                if self._ends_with_client:
                    answering.cancel()
                return
            size_bytes += len(message.get("body", b""))


async def _send(send: Send, message: Message) -> None:
    """Send a part of the answer; the last one without an interruption.

    During the last one hypercorn reports a disconnect, and `_take_in` may then cancel the answer.
    Without the shield this would stop hypercorn before it has closed the connection of a client
    that wants it to be closed.
    """
    is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
    with trio.CancelScope(shield=is_last):
        await send(message)
