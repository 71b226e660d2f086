"""HTTP/1.1 on a listening socket: hypercorn's trio worker, with limits on each client's cost.

This doesn't use hypercorn's `serve`, because that would wait for ever, even when cancelled, for a
client that doesn't read. No request is logged, and no signal handler is installed.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

    async def answer(stream: trio.SocketStream) -> None:
        if len(open_ones) >= MAX_CONNECTIONS:
            if not makes_room:
                await stream.aclose()
                return
            open_ones.popitem(last=False)[0].socket.close()
        open_ones[stream] = None

        def note_request() -> None:
            if stream in open_ones:
                open_ones.move_to_end(stream)

        bounded: Any = _Bounded(app, note_request, ends_with_client=makes_room)
        try:
            impatient: Any = _ImpatientStream(stream)
            wrapped = ASGIWrapper(bounded)
            await _Connection(wrapped, config, context, ConnectionState({}), impatient)
        finally:
            open_ones.pop(stream, None)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, answer, [listener])
        task_status.started()


class _Connection(TCPServer):
    async def _read_data(self) -> None:
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
                await self._stream.send_all(left[:_SEND_BYTES])
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
        self, app: ASGIApp, on_request: Callable[[], None], ends_with_client: bool
    ) -> None:
        self._app = app
        self._on_request = on_request
        self._ends_with_client = ends_with_client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self._on_request()
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
