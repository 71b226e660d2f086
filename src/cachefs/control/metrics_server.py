"""Metrics and health on TCP: `/metrics`, `/healthz`, `/readyz`, and the console.

There is no access control: every process that can connect gets an answer. Only the console has
parts that need a session (`console/app.py`)."""

import logging
import math
import os
import socket
from collections.abc import Mapping

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as Path

from cachefs.config import OFF, MountConfig, join_address, split_address
from cachefs.control.api import Handler, Route
from cachefs.control.console.app import console_app
from cachefs.control.exporter import Exporter
from cachefs.control.http import serve_http
from cachefs.control.mount_state import MountState
from cachefs.errors import CachefsError

log = logging.getLogger(__name__)

_NO_HANDLERS: Mapping[Route, Handler] = {}

_PAUSE, _LEAST_PAUSE_S = 10, 0.02
"""After a scrape, the next one waits ten times as long as the scrape took. So the loop has nine
tenths of its time for readers, with any number of scraping clients."""


async def serve_metrics(
    state: MountState,
    handlers: Mapping[Route, Handler] = _NO_HANDLERS,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled, on the configured address; sets `state.metrics_address`. `handlers`
    are those of the control socket; the console uses some of them.

    If the default port is taken (by an earlier mount), this uses another port, so that the mount
    doesn't fail. Raises `CachefsError` if it can't listen on an address set in the configuration.
    """
    sock = await trio.to_thread.run_sync(_listen, state.config)
    if sock is None:
        task_status.started()
        return
    state.metrics_address = join_address(*sock.getsockname()[:2])
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    try:
        app = application(state, handlers)
        await serve_http(app, listener, makes_room=True, task_status=task_status)
    finally:
        sock.close()
        state.metrics_address = None


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


def _listen(config: MountConfig) -> socket.socket | None:
    """Return a listening socket; None if metrics are off, or the default address can't be used.
    Blocks while it resolves the host's name. Raises `CachefsError`."""
    if config.metrics == OFF:
        return None
    host, port = split_address(config.metrics)
    try:
        return _bound(host, port)
    except OSError as error:
        reason = _why(error)
        if "metrics" in config.given:
            raise CachefsError(
                f"can't listen on {config.metrics} for metrics: {reason}; choose another address "
                "with --metrics"
            ) from error
    try:
        sock = _bound(host, 0)
    except OSError as error:
        log.info("no metrics are served: can't listen on %s: %s", host, _why(error))
        return None
    found = join_address(*sock.getsockname()[:2])
    log.info("metrics are on %s: can't listen on %s: %s", found, config.metrics, reason)
    return sock


def _why(error: OSError) -> str:
    # The text of errors from `create_server` repeats the address, so use the text of the errno.
    # Errors of name look-ups (`gaierror`) have other numbers.
    if error.errno is None or isinstance(error, socket.gaierror):
        return str(error.strerror or error)
    return os.strerror(error.errno)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)
