"""Checks requests to the console before anything else sees them, and adds headers to all answers.

Pages of other sites can let a browser send requests to this server. A name of theirs that resolves
to a loopback address (DNS rebinding) would even make it the same site, so the `Host` must be one
that no other site can have. Sessions are no cookies, so no other page can use them.
"""

import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cachefs.control.sessions import Sessions

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Lets only requests with a proper `Host` and `Origin` through."""

    def __init__(self, app: ASGIApp, own_host: str) -> None:
        """`own_host` is the host that the server was told to listen on."""
        self._app = app
        self._own_host = own_host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        app = self._app
        host = _host_of(f"//{headers.get('host', '')}")
        origin = headers.get("origin")
        if not self._is_own(host, scope):
            app = _refusal(421, "the console answers only to localhost and to its own address")
        elif origin is not None and _address_of(origin) != headers.get("host"):
            app = _refusal(403, "the console answers only to its own page")
        await app(scope, receive, send_more)

    def _is_own(self, host: str, scope: Scope) -> bool:
        """Return whether `host` leads here and can't be a name of another site."""
        if host in {"localhost", self._own_host}:
            return True
        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            return address.is_loopback or host == (scope.get("server") or ("",))[0]
        return False


class HostGuard:
    """Lets only requests through whose `Host` can't be a name of another site, if they come through
    the loopback interface. Elsewhere a name may be that of the node, as in a configuration of
    Prometheus."""

    def __init__(self, app: ASGIApp, own_host: str) -> None:
        """`own_host` is as in `Guard`."""
        self._app = app
        self._own_hosts = {"", "localhost", own_host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        host = _host_of(f"//{Headers(scope=scope).get('host', '')}")
        is_own = host in self._own_hosts or _is_address(host)
        if not is_own and _is_loopback((scope.get("server") or ("",))[0]):
            app = _refusal(421, "this port answers only to localhost and to addresses")
        await app(scope, receive, send)


class SessionGuard:
    """Lets only requests with a session through, from the same machine: a session must not cross
    the network in clear text."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        kind, _, session = Headers(scope=scope).get("authorization", "").partition(" ")
        if not is_local(scope):
            app = _refusal(403, _NOT_LOCAL)
        elif kind.lower() != "bearer" or not self._sessions.is_valid(session):
            app = _refusal(401, "this needs a session; open the console with: cachefs console")
        await app(scope, receive, send)


class LocalGuard:
    """Lets only requests from the same machine through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if is_local(scope) else _refusal(403, _NOT_LOCAL)
        await app(scope, receive, send)


_NOT_LOCAL = (
    "sessions are only for browsers on the same machine; forward the port, for example with: "
    "ssh -L 9567:127.0.0.1:9567 NODE"
)


def is_local(scope: Scope) -> bool:
    """Return whether the client is on the same machine, through its loopback interface."""
    return _is_loopback((scope.get("client") or ("",))[0])


def _is_loopback(host: str | None) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return False


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _host_of(url: str) -> str:
    """Return the host in lower case; "" if there is none."""
    with suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


def _address_of(url: str) -> str | None:
    """Return host and port as they are written; None if `url` is none."""
    with suppress(ValueError):
        return urlsplit(url).netloc
    return None


def _refusal(code: int, text: str) -> ASGIApp:
    return JSONResponse({"error": text}, code)
