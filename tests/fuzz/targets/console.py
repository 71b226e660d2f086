"""Requests to the address of the metrics and the console (control/console/).

An input is a line of method and path, lines of headers, an empty line, and the body. In the input
TOKEN stands for a token, and SESSION for a session. Only with SESSION does an action begin.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import trio

from cachefs.control.api import CACHE_EVICT, SET, Handler, Route
from cachefs.control.console.app import LIMITS
from cachefs.control.console.guard import HEADERS
from cachefs.control.metrics_server import application
from cachefs.control.mount_state import MountState
from tests.unit.test_metrics import House

_PATIENCE_S = 100.0
"""How long an answer may take to begin. On a busy machine the first one takes seconds."""


@contextlib.contextmanager
def _no_other_mounts() -> Iterator[None]:
    with mock.patch("cachefs.control.console.node.read_entries", list):
        yield


async def _ask(data: bytes) -> None:
    house = House()
    state: MountState = house.state
    session = state.sessions.exchange(state.sessions.new_token())
    assert session is not None
    given = data.replace(b"TOKEN", state.sessions.new_token().encode())
    given = given.replace(b"SESSION", session.encode())
    head, _, body = given.partition(b"\n\n")
    line, *headers = head.split(b"\n")
    method, _, path = line.decode("latin-1").partition(" ")
    acted: list[dict[str, Any]] = []

    async def act(arguments: dict[str, Any]) -> dict[str, Any]:
        acted.append(arguments)
        return {}

    handlers: dict[Route, Handler] = {CACHE_EVICT: act, SET: act}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode("latin-1"),
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [
            (name.strip().lower(), value.strip())
            for name, _, value in (header.partition(b":") for header in headers)
        ],
        "server": ("127.0.0.1", 9567), "client": ("127.0.0.1", 1), "extensions": {},
    }  # fmt: skip
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    starts: list[dict[str, Any]] = []
    begun = trio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await begun.wait()  # the client goes away once the answer begins: no stream is endless
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if "status" in message:
            starts.append(message)
            begun.set()

    with trio.move_on_after(_PATIENCE_S), _no_other_mounts():
        await application(state, handlers)(scope, receive, send)
    (start,) = starts
    assert start["status"] < 500
    if acted:
        assert session.encode() in head
    if path.endswith("/settings"):
        assert all(arguments.keys() <= LIMITS for arguments in acted)
    if path == "/" or path.startswith("/console/"):
        sent = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        assert all(sent.get(name.lower()) == value for name, value in HEADERS.items())


GROWING = {
    "a long path": lambda count: b"GET /" + b"x" * count + b"\n",
    "a deep path": lambda count: b"GET /console" + b"/." * (count // 2) + b"\n",
    "headers": lambda count: b"GET /console/\n" + b"a: b\n" * (count // 5),
    "cookies": lambda count: b"GET /v1/status\ncookie: " + b"a=b;" * (count // 4),
    "quotes in a cookie": lambda count: b"GET /v1/status\ncookie: a=" + b'"\\' * (count // 2),
    "origin": lambda count: b"POST /v1/settings\norigin: http://" + b"[" * count,
    "a host": lambda count: b"GET /\nhost: " + b"a." * (count // 2),
    "a body": lambda count: b"POST /v1/settings\ncookie: SESSION\n\n" + b"[" * count,
}
MOST_BYTES = 1 << 18
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    trio.run(_ask, data)
