"""The daemon's side of the control socket: HTTP on a Unix socket, JSON both ways.

The answer to a failed request is a status code and `{"error": "one line"}`. A stream is lines of
JSON. A blank line only shows that the daemon is still working. A line `{"error": ...}` is the last.
"""

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from cachefs import __version__
from cachefs.control import api
from cachefs.control.api import Handler, Lines, Route, UnknownError
from cachefs.control.http import MAX_BODY_BYTES
from cachefs.errors import (
    AccessDeniedError,
    CachefsError,
    NotADirError,
    NotFoundError,
    OriginError,
    UsageError,
)

REQUEST_TIMEOUT_S = 2.0
"""How long the body of a request may take after its head. The answer to a slower request is an
error, and its connection is closed."""

HEARTBEAT_S = 5.0
"""The daemon sends a blank line when a stream had no line for this long."""

_STATUS_CODES: tuple[tuple[type[CachefsError], int], ...] = (
    (UsageError, 400),
    (AccessDeniedError, 403),
    (UnknownError, 404),
    (NotFoundError, 404),
    (NotADirError, 404),
    (OriginError, 502),
    (CachefsError, 409),
)
"""Status codes of errors. The first class that fits counts."""

_logger = logging.getLogger(__name__)


def application(handlers: Mapping[Route, Handler]) -> Starlette:
    """Return the ASGI application that answers with `handlers`, and to `api.INDEX` with the list
    of routes."""

    async def index(arguments: dict[str, Any]) -> Mapping[str, object]:
        return {"version": __version__, "routes": sorted(map(str, table))}

    table: dict[Route, Handler] = {api.INDEX: index, **handlers}
    routes = [
        StarletteRoute(route.path, _endpoint(route, handler), methods=[route.method])
        for route, handler in table.items()
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


# -- one request ---------------------------------------------------------------------------------


def _endpoint(route: Route, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            answer = handler(await _arguments(request))
            if isinstance(answer, AsyncGenerator):
                return _LinesResponse(route, answer)
            return _response(200, await answer)
        except (HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            return _response(*_explained(route, error))

    return answer


def _explained(route: Route, error: Exception) -> tuple[int, Mapping[str, object]]:
    """Return status code and body for an error. Logs an error that is no `CachefsError`."""
    for kind, code in _STATUS_CODES:
        if isinstance(error, kind):
            return code, {"error": str(error)}
    _logger.error("the request %s could not be answered", route, exc_info=error)
    return 500, {"error": f"internal error: {type(error).__name__}: {error}"}


def _response(code: int, content: Mapping[str, object]) -> Response:
    return Response(json.dumps(content), code, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code in {404, 405}:
        path = request.scope["path"]  # `request.url` requires a UTF-8 query
        text = (
            f'the daemon doesn\'t know "{request.method} {path}"; it is of another '
            "version than this command"
        )
    return _response(error.status_code, {"error": text})


async def _arguments(request: Request) -> dict[str, Any]:
    """Return the arguments: the query of a GET, or the body of a POST. Raises `UsageError` and
    `HTTPException`."""
    if request.method != "POST":
        query = request.scope["query_string"].decode("ascii", "replace")
        return dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))
    body = b""
    with trio.move_on_after(REQUEST_TIMEOUT_S) as waiting:
        async with aclosing(request.stream()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the request is longer than {MAX_BODY_BYTES} bytes")
    if waiting.cancelled_caught:
        raise HTTPException(408, f"the request did not come within {REQUEST_TIMEOUT_S:g} s")
    try:
        arguments = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError("the body of a request is a JSON object with its arguments")
    return arguments


class _LinesResponse(Response):
    """Answers with a stream of lines. The head is sent with the first line, so that an error before
    it gets its own status code."""

    def __init__(self, route: Route, lines: Lines) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._route = route
        self._lines = lines
        self._began = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            await self._answer(send)
            nursery.cancel_scope.cancel()

    async def _answer(self, send: Send) -> None:
        into, out = trio.open_memory_channel[Mapping[str, object] | Exception](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._produce, into)
            done = False
            while not done:
                item: Mapping[str, object] | Exception | None = None
                with trio.move_on_after(HEARTBEAT_S):
                    try:
                        item = await out.receive()
                    except trio.EndOfChannel:
                        break
                if isinstance(item, Exception):
                    code, item = _explained(self._route, item)
                    done = True
                    if not self._began:
                        self.status_code = code
                await self._send_line(send, b"" if item is None else json.dumps(item).encode())
            nursery.cancel_scope.cancel()
        if not self._began:
            await self._begin(send)
        # When the answer ends, hypercorn reports a disconnect during this call, and
        # `_cancel_when_gone` would cancel it half-way.
        with trio.CancelScope(shield=True):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _produce(
        self, into: trio.MemorySendChannel[Mapping[str, object] | Exception]
    ) -> None:
        async with into, aclosing(self._lines) as lines:
            try:
                async for line in lines:
                    await into.send(line)
            except Exception as error:
                await into.send(error)

    async def _begin(self, send: Send) -> None:
        self._began = True
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

    async def _send_line(self, send: Send, line: bytes) -> None:
        if not self._began:
            await self._begin(send)
        await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
