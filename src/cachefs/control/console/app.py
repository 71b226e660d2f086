"""The console's routes.

Everybody who reaches the address can read the page and its figures, which are those of `/metrics`.
Names of files and all actions need a session (`control/sessions.py`). They use handlers of the
control socket, so they do and check the same.
"""

from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as Path
from starlette.types import ASGIApp

from cachefs.config import OFF, split_address
from cachefs.control import api, server
from cachefs.control.api import Handler, Route
from cachefs.control.console.assets import asset, page
from cachefs.control.console.guard import Guard, LocalGuard, SessionGuard, is_local
from cachefs.control.console.node import NodeMounts
from cachefs.control.console.snapshot import Snapshots
from cachefs.control.exporter import Exporter
from cachefs.control.mount_state import MountState
from cachefs.control.sessions import SESSION_S, Sessions
from cachefs.errors import AccessDeniedError, UsageError

BEGIN = Route("POST", "/begin")
END = Route("POST", "/end")
OTHER_TOKEN = Route("POST", "/v1/console/token")

ROUTES = (
    *(api.SETTINGS, api.SET, api.PROFILE),
    *(api.JOBS, api.JOB_CREATE, api.JOB_START, api.JOB_CANCEL, api.JOB_RESUME),
    *(api.CACHE_NAMES, api.CACHE_USAGE, api.CACHE_EVICT, api.CACHE_PIN, api.CACHE_UNPIN),
)
"""The routes of the control socket that the console uses."""

LIMITS = frozenset({"max_downloads", "download_limit", "limit_uid"})
"""The settings that the console may change."""


def console_app(
    state: MountState, exporter: Exporter, handlers: Mapping[Route, Handler]
) -> ASGIApp:
    """Return the ASGI application for `/` and for `/console/`. `handlers` are those of the control
    socket."""
    snapshots = Snapshots(state, exporter)
    mounts = NodeMounts(state.config.mountpoint)

    async def figures(request: Request) -> Response:
        return Response(snapshots.content(), media_type="application/json")

    async def node(request: Request) -> Response:
        rows = await mounts.rows()
        if not is_local(request.scope):  # the mount table is for users of this machine
            rows = [row for row in rows if row.get("is_this")]
        return JSONResponse({"mounts": rows})

    used = {route: handlers[route] for route in ROUTES if route in handlers}
    if api.SET in used:
        used[api.SET] = _only_limits(used[api.SET])
    actions = server.application({**used, OTHER_TOKEN: mounts.token})
    begin_and_end = server.application(_session_handlers(state.sessions))
    routes = [
        Path("/", page),
        Path("/assets/{name}", asset),
        Path("/snapshot", figures),
        Path("/mounts", node),
        Mount("/session", LocalGuard(begin_and_end)),
        Mount("/actions", SessionGuard(actions, state.sessions)),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    own_host = "" if state.config.metrics == OFF else split_address(state.config.metrics)[0]
    return Guard(app, own_host)


def _session_handlers(sessions: Sessions) -> dict[Route, Handler]:
    async def begin(arguments: dict[str, Any]) -> Mapping[str, object]:
        session = sessions.exchange(_text(arguments, "token"))
        if session is None:
            raise AccessDeniedError(
                "the link was used already, or is too old; get another one with: cachefs console"
            )
        return {"session": session, "valid_s": SESSION_S}

    async def end(arguments: dict[str, Any]) -> Mapping[str, object]:
        sessions.end(_text(arguments, "session"))
        return {}

    return {BEGIN: begin, END: end}


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text")
    return value


def _only_limits(change: Handler) -> Handler:
    async def answer(arguments: dict[str, Any]) -> Mapping[str, object]:
        if others := sorted(arguments.keys() - LIMITS):
            raise AccessDeniedError(f"the console can't set {others[0]!r:.40}; use: cachefs set")
        answering = change(arguments)
        assert isinstance(answering, Awaitable)
        return await answering

    return answer
