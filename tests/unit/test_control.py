"""The control socket: both ends of it, and clients that misbehave."""

import contextlib
import http.client as http_client
import json
import os
import re
import socket
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs import __version__
from cachefs.control import api, http
from cachefs.control.api import Handler, NoSuchTierError, Route
from cachefs.control.client import ask, stream
from cachefs.control.http import MAX_BODY_BYTES, MAX_CONNECTIONS
from cachefs.control.serving import serve_commands as serve
from cachefs.errors import CacheDirError, CachefsError, OriginUnavailableError, UsageError

ECHO = Route("POST", "/v1/echo")
FIND = Route("GET", "/v1/find")
WATCH = Route("POST", "/v1/watch")
HOST = b"Host: cachefs\r\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.sock"


def telling(tell: Callable[[], dict[str, Any]]) -> dict[Route, Handler]:
    """A server with one route."""

    async def status(arguments: dict[str, Any]) -> dict[str, Any]:
        assert arguments == {}
        return tell()

    return {api.STATUS: status}


async def echo(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"got": arguments}


async def asked(path: Path, *args: Any, **options: Any) -> dict[str, Any]:
    options.setdefault("timeout_s", 60.0)
    return await trio.to_thread.run_sync(partial(ask, path, *args, **options))


async def streamed(path: Path, *args: Any) -> list[dict[str, Any]]:
    return await trio.to_thread.run_sync(lambda: list(stream(path, *args)))


async def sent(path: Path, request: bytes) -> tuple[int, Any]:
    """Status code and JSON of the answer to raw bytes; -1 for none."""
    answer = b""
    async with await trio.open_unix_socket(path) as connection:
        with contextlib.suppress(trio.BrokenResourceError):  # a server may have seen enough
            await connection.send_all(request)
        with contextlib.suppress(trio.BrokenResourceError):
            async for piece in connection:
                answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else -1, json.loads(body) if body else None


def post(route: Route, body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {route.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + body


def test_the_document_lists_every_route() -> None:
    document = Path(__file__).parents[2] / "docs" / "CONTROL.md"
    rows = re.findall(r"^\| `((?:GET|POST) \S+)` \|", document.read_text(), re.MULTILINE)
    assert rows == [str(route) for route in vars(api).values() if isinstance(route, Route)]


# -- asking --------------------------------------------------------------------------------------


async def test_a_client_gets_the_status(path: Path, nursery: trio.Nursery) -> None:
    calls = iter(range(10))
    await nursery.start(serve, path, telling(lambda: {"calls": next(calls)}))
    assert await asked(path) == {"calls": 0}
    assert await asked(path) == {"calls": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_long_status_arrives_whole(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, telling(lambda: {"dirs": ["x" * 500_000]}))
    assert len((await asked(path))["dirs"][0]) == 500_000


async def test_an_answer_that_is_closed_with_its_last_byte(
    path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.13 closes it, and the socket, too."""
    plain = http_client.HTTPResponse.read1

    def read1(response: http_client.HTTPResponse, most: int = -1) -> bytes:
        data = plain(response, most)
        if response.length == 0 and not response.isclosed():
            response._close_conn()  # type: ignore[attr-defined]
        return data

    monkeypatch.setattr(http_client.HTTPResponse, "read1", read1)
    await nursery.start(serve, path, telling(lambda: {"answer": 42}))
    assert await asked(path) == {"answer": 42}


async def test_the_index_names_all_routes(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, {ECHO: echo, FIND: echo})
    routes = ["GET /v1", "GET /v1/find", "POST /v1/echo"]
    assert await asked(path, api.INDEX) == {"version": __version__, "routes": routes}


async def test_a_route_gets_its_arguments(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, {ECHO: echo, FIND: echo})
    arguments: dict[str, object] = {"path": "/ü\udcff", "quota_bytes": 1 << 62, "high": 0.5}
    assert await asked(path, ECHO, arguments) == {"got": arguments}
    assert await asked(path, ECHO) == {"got": {}}
    texts = {"path": "/ü&=?#% +\udcff", "empty": ""}
    assert await asked(path, FIND, texts) == {"got": texts}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CacheDirError("the directory is on fire; put it out"), 409),
        (UsageError("the directory is on fire; put it out"), 400),
        (NoSuchTierError("the directory is on fire; put it out"), 404),
        (OriginUnavailableError("the directory is on fire; put it out"), 502),
    ],
)
async def test_an_expected_failure_is_told_and_not_logged(
    path: Path, nursery: trio.Nursery, error: CachefsError, code: int
) -> None:
    async def fail(arguments: dict[str, Any]) -> dict[str, Any]:
        raise error

    await nursery.start(serve, path, {ECHO: fail})
    with pytest.raises(CachefsError, match=r"^the directory is on fire; put it out$"):
        await asked(path, ECHO)
    assert await sent(path, post(ECHO, b"{}")) == (code, {"error": str(error)})


@pytest.mark.expect_log("the request GET /v1/status could not be answered.*boom")
async def test_a_failing_status_does_not_end_the_server(path: Path, nursery: trio.Nursery) -> None:
    answers = iter([ValueError("boom")])

    def handler() -> dict[str, int]:
        for error in answers:
            raise error
        return {"ok": 1}

    await nursery.start(serve, path, telling(handler))
    with pytest.raises(CachefsError, match="ValueError: boom"):
        await asked(path)
    assert await asked(path) == {"ok": 1}


async def test_an_unknown_route(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, {ECHO: echo})
    for route in (Route("POST", "/v1/brew"), Route("GET", ECHO.path), Route("POST", "/v1/echo/")):
        with pytest.raises(CachefsError, match=f'the daemon doesn\'t know "{route}"; it is of ano'):
            await asked(path, route)


async def test_an_answer_before_the_body_was_read(path: Path, nursery: trio.Nursery) -> None:
    """The body is longer than the buffers of a socket: the client still sends when all is over."""

    def answer_early(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1)
            body = b'{"error": "not known"}'
            connection.sendall(b"HTTP/1.1 404 \r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        nursery.start_soon(trio.to_thread.run_sync, answer_early, listener)
        with pytest.raises(CachefsError, match=r"^not known$"):
            await asked(path, ECHO, {"pad": "x" * (4 << 20)})


# -- streams -------------------------------------------------------------------------------------


async def test_a_stream(path: Path, nursery: trio.Nursery) -> None:
    async def count(arguments: dict[str, Any]) -> AsyncGenerator[Mapping[str, object], None]:
        for number in range(arguments["to"]):
            yield {"n": number, "pad": "x" * 100_000}

    await nursery.start(serve, path, {WATCH: count})
    assert [line["n"] for line in await streamed(path, WATCH, {"to": 30})] == list(range(30))
    assert await streamed(path, WATCH, {"to": 0}) == []


async def test_a_stream_that_fails(path: Path, nursery: trio.Nursery) -> None:
    async def fail(arguments: dict[str, Any]) -> AsyncGenerator[Mapping[str, object], None]:
        for number in range(arguments["after"]):
            yield {"n": number}
        raise UsageError("that was enough")

    await nursery.start(serve, path, {WATCH: fail})
    seen = []

    def read() -> None:
        for line in stream(path, WATCH, {"after": 2}):
            seen.append(line["n"])

    with pytest.raises(CachefsError, match=r"^that was enough$"):
        await trio.to_thread.run_sync(read)
    assert seen == [0, 1]
    status, body = await sent(path, post(WATCH, b'{"after": 0}').replace(b"1.1", b"1.0"))
    assert (status, body) == (400, {"error": "that was enough"})


async def test_a_stream_ends_when_its_client_leaves(path: Path, nursery: trio.Nursery) -> None:
    ended = trio.Event()

    async def watch(arguments: dict[str, Any]) -> AsyncGenerator[Mapping[str, object], None]:
        try:
            yield {"n": 1}
            await trio.sleep_forever()
        finally:
            ended.set()

    def read_one() -> dict[str, Any]:
        lines = stream(path, WATCH)
        assert isinstance(lines, Iterator)
        return next(lines)

    await nursery.start(serve, path, {WATCH: watch})
    assert await trio.to_thread.run_sync(read_one) == {"n": 1}
    with trio.fail_after(300):
        await ended.wait()


async def test_a_silent_stream_has_a_pulse(
    path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async def watch(arguments: dict[str, Any]) -> AsyncGenerator[Mapping[str, object], None]:
        await trio.sleep(12)
        yield {"n": 1}

    await nursery.start(serve, path, {WATCH: watch})
    async with await trio.open_unix_socket(path) as connection:
        await connection.send_all(post(WATCH, b"{}").replace(b"1.1", b"1.0"))
        answer = b"".join([chunk async for chunk in connection])
    assert answer.endswith(b'\r\n\r\n\n\n{"n": 1}\n')


async def test_a_daemon_that_dies_in_the_middle_of_a_stream(
    path: Path, nursery: trio.Nursery
) -> None:
    async def watch(arguments: dict[str, Any]) -> AsyncGenerator[Mapping[str, object], None]:
        yield {"n": 1}
        server.cancel()
        await trio.sleep_forever()

    async def run(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        async with trio.open_nursery() as inner:
            await inner.start(serve, path, {WATCH: watch})
            task_status.started(inner.cancel_scope)

    server = await nursery.start(run)
    with pytest.raises(CachefsError, match=r"did not answer as it should.*it has ended"):
        await streamed(path, WATCH)


# -- the socket ----------------------------------------------------------------------------------


async def test_the_socket_goes_when_the_server_does(path: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, path, telling(dict))
        assert path.exists()
        nursery.cancel_scope.cancel()
    assert not path.exists()
    with pytest.raises(CachefsError, match="no daemon listens"):
        ask(path)


async def test_what_a_dead_daemon_left_is_replaced(path: Path, nursery: trio.Nursery) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(CachefsError, match="no daemon listens"):
        ask(path)
    await nursery.start(serve, path, telling(dict))
    assert await asked(path) == {}


async def test_a_living_server_is_not_replaced(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, telling(lambda: {"first": True}))
    with pytest.raises(CachefsError, match="another process is listening"):
        await serve(path, {})
    assert await asked(path) == {"first": True}


async def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CachefsError, match="can't listen"):
        await serve(tmp_path / "missing" / "deeper" / "x.sock", {})
    with pytest.raises(CachefsError, match="can't listen"):
        await serve(tmp_path / ("long" * 40), {})
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CachefsError, match="can't listen"):
        await serve(tmp_path / "file", {})
    assert (tmp_path / "file").read_text() == "precious"


# -- clients that misbehave ----------------------------------------------------------------------


async def test_clients_that_leave_or_do_not_read_do_no_harm(
    path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await nursery.start(serve, path, telling(lambda: {"x": "y" * 10_000_000}))
    await sent(path, b"\0")  # loads the server
    leaving = await trio.open_unix_socket(path)
    await leaving.aclose()
    idle = await trio.open_unix_socket(path)
    await idle.send_all(b"GET /v1/status HTTP/1.1\r\n" + HOST + b"\r\n")
    await trio.sleep(10)  # virtual time: the server has given up on the idle one
    assert len(b"".join([chunk async for chunk in idle])) < 10_000_000
    await idle.aclose()


async def test_a_client_that_does_not_read_does_not_hold_up_the_end(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, path, telling(lambda: {"x": "y" * 10_000_000}))
        await sent(path, b"\0")  # loads the server
        idle = await trio.open_unix_socket(path)
        await idle.send_all(b"GET /v1/status HTTP/1.1\r\n" + HOST + b"\r\n")
        await trio.sleep(0.1)
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 5
    await idle.aclose()


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"\xff", b"[" * 60_000, b"{"])
async def test_a_request_that_is_none(path: Path, nursery: trio.Nursery, body: bytes) -> None:
    await nursery.start(serve, path, {ECHO: echo})
    code, answer = await sent(path, post(ECHO, body))
    assert code == 400
    assert "the body of a request is a JSON object" in answer["error"]
    assert await sent(path, post(ECHO, b"")) == (200, {"got": {}})


@pytest.mark.parametrize("noise", [b'{"verb": "status"}\r\n\r\n', b"\0" * 100, b"x" * 100_000])
async def test_what_is_not_http(path: Path, nursery: trio.Nursery, noise: bytes) -> None:
    await nursery.start(serve, path, telling(dict))
    assert (await sent(path, noise))[0] in {400, 431}
    assert await asked(path) == {}


async def test_a_request_that_is_too_long(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, {ECHO: echo})
    await asked(path, ECHO)  # loads the server
    tasks = trio.lowlevel.current_statistics().tasks_living
    async with await trio.open_unix_socket(path) as connection, trio.open_nursery() as sending:

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await connection.send_all(post(ECHO, b"x" * 50 * MAX_BODY_BYTES))

        sending.start_soon(send)
        answer = await connection.receive_some(1000)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert await asked(path, ECHO) == {"got": {}}
    with trio.fail_after(300):  # nothing of the connection is left
        while trio.lowlevel.current_statistics().tasks_living > tasks:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_client_that_sends_nothing_is_dropped(
    path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await nursery.start(serve, path, {ECHO: echo})
    assert await sent(path, b"") == (-1, None)
    assert await sent(path, b"GET /v1/status HTT") == (-1, None)
    code, answer = await sent(path, post(ECHO, b'{"half', 1000))
    assert code == 408
    assert "did not come" in answer["error"]
    assert trio.current_time() < 20


async def test_too_many_connections(
    path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 600.0)  # none is dropped for its silence meanwhile
    await nursery.start(serve, path, telling(dict))
    await sent(path, b"\0")  # loads the server
    idle = [await trio.open_unix_socket(path) for _ in range(MAX_CONNECTIONS)]
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(CachefsError, match=r"did not answer as it should|can't ask"):
        await asked(path)
    for connection in idle:
        await connection.aclose()
    answer = None
    with trio.fail_after(300):
        while answer is None:
            with contextlib.suppress(CachefsError):
                answer = await asked(path)
    assert answer == {}


# -- daemons that misbehave ----------------------------------------------------------------------


def test_a_silent_daemon_is_given_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(CachefsError, match=r"did not answer .* within 0.2 s"):
            ask(path, timeout_s=0.2)


@pytest.mark.parametrize("reply", [b"", b"nonsense", b"[]", b'"text"', b"\xff"])
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
def test_an_answer_that_is_none(path: Path, head: bytes, reply: bytes) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(head + reply)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        with pytest.raises(CachefsError, match="did not answer as it should"):
            ask(path)
        thread.join()


def test_the_client_needs_permission(path: Path) -> None:
    if os.geteuid() == 0:
        path.mkdir()
        with pytest.raises(CachefsError):
            ask(path)
    else:
        path.touch(mode=0)
        with pytest.raises(CachefsError):
            ask(path)
