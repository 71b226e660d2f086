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

from cachefs.control.api import Handler, Route
from cachefs.control.console.app import console_app
from cachefs.control.exporter import Exporter
from cachefs.control.mount_state import MountState

_NO_HANDLERS: Mapping[Route, Handler] = {}

_PAUSE, _LEAST_PAUSE_S = 10, 0.02
"""After a scrape, the next one waits ten times as long as the scrape took. So the loop has nine
tenths of its time for readers, with any number of scraping clients."""


def application(state: MountState, handlers: Mapping[Route, Handler] = _NO_HANDLERS) -> Starlette:
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
    routes = [
        Path("/metrics", metrics),
        Path("/healthz", healthz),
        Path("/readyz", readyz),
        Path("/", console),
        Mount("/console", console),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return app
