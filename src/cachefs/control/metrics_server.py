"""Metrics and health on TCP: `/metrics`, `/healthz`, `/readyz`, and the console.

There is no access control: every process that can connect gets an answer. Only the console has
parts that need a session (`console/app.py`)."""

import math
from collections.abc import Mapping

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Receive, Scope, Send

from cachefs.config import OFF, split_address
from cachefs.control.api import Handler, Route
from cachefs.control.console.app import console_app
from cachefs.control.console.guard import HostGuard
from cachefs.control.exporter import Exporter
from cachefs.control.mount_state import MountState
from cachefs.control.pace import Paced

_NO_HANDLERS: Mapping[Route, Handler] = {}

_PAUSE, _LEAST_PAUSE_S = 10, 0.02
"""After a scrape, the next one waits ten times as long as the scrape took. So the loop has nine
tenths of its time for readers, with any number of scraping clients."""

_HEALTH = ("/healthz", "/readyz")
_HEALTH_PER_S, _OTHERS_PER_S = 200.0, 100.0
"""A request costs up to a millisecond of the loop. A page of the console sends some 30 at once."""


def application(state: MountState, handlers: Mapping[Route, Handler] = _NO_HANDLERS) -> ASGIApp:
    """Return the ASGI application."""
    exporter = Exporter(state)
    turn = trio.Lock()  # fair: waiting requests get it in the order of their arrival
    free_at = -math.inf

    async def metrics(request: Request) -> Response:
        nonlocal free_at
        async with turn:
            await trio.sleep_until(free_at)
            began = trio.current_time()
            text, content_type = exporter.render(request.headers.get("accept", ""))
            cost_s = trio.current_time() - began
            free_at = trio.current_time() + max(_LEAST_PAUSE_S, _PAUSE * cost_s)
        return Response(text, headers={"Content-Type": content_type})

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")  # any answer shows that the daemon lives

    async def readyz(request: Request) -> Response:
        reason = state.unready_reason()
        if reason is None:
            problem = state.unsent_problem()
            if state.origin.is_down:
                problem = "from the cache: the origin does not answer"
            return PlainTextResponse("ok\n" if problem is None else f"ok, {problem}\n")
        return PlainTextResponse(f"{reason}\n", 503)

    console = console_app(state, exporter, handlers)
    health = Starlette(routes=[Path("/healthz", healthz), Path("/readyz", readyz)])
    others = Starlette(
        routes=[Path("/metrics", metrics), Path("/", console), Mount("/console", console)]
    )
    health.router.redirect_slashes = others.router.redirect_slashes = False
    paced_health, paced_others = Paced(health, _HEALTH_PER_S), Paced(others, _OTHERS_PER_S)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        app = paced_health if scope.get("path") in _HEALTH else paced_others
        await app(scope, receive, send)

    own_host = "" if state.config.metrics == OFF else split_address(state.config.metrics)[0]
    guarded = HostGuard(answer, own_host)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        has_own_guard = path == "/" or path.startswith("/console")
        await (answer if has_own_guard else guarded)(scope, receive, send)

    return guard
