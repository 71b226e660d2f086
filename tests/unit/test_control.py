import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.control.client import ask
from cachefs.control.server import MAX_REQUEST_BYTES, Handler, serve
from cachefs.errors import CacheDirError, CachefsError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.sock"


def telling(tell: Callable[[], dict[str, Any]]) -> dict[str, Handler]:
    """A server with one verb."""

    async def status(arguments: dict[str, Any]) -> dict[str, Any]:
        assert arguments == {}
        return tell()

    return {"status": status}


async def sent(path: Path, request: bytes) -> Any:
    """The answer to raw bytes; None for none."""
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(request)
        answer = b"".join([chunk async for chunk in stream])
    return json.loads(answer) if answer else None


async def test_a_client_gets_the_status(path: Path, nursery: trio.Nursery) -> None:
    calls = iter(range(10))
    await nursery.start(serve, path, telling(lambda: {"calls": next(calls)}))
    assert await trio.to_thread.run_sync(ask, path) == {"calls": 0}
    assert await trio.to_thread.run_sync(ask, path) == {"calls": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_long_status_arrives_whole(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, telling(lambda: {"dirs": ["x" * 500_000]}))
    assert len((await trio.to_thread.run_sync(ask, path))["dirs"][0]) == 500_000


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
    assert await trio.to_thread.run_sync(ask, path) == {}


async def test_a_living_server_is_not_replaced(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, telling(lambda: {"first": True}))
    with pytest.raises(CachefsError, match="another process is listening"):
        await serve(path, {})
    assert await trio.to_thread.run_sync(ask, path) == {"first": True}


async def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CachefsError, match="can't listen"):
        await serve(tmp_path / "missing" / "x.sock", {})
    with pytest.raises(CachefsError, match="can't listen"):
        await serve(tmp_path / ("long" * 40), {})
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CachefsError, match="can't listen"):
        await serve(tmp_path / "file", {})
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.expect_log("the request 'status' could not be answered.*boom")
async def test_a_failing_status_does_not_end_the_server(path: Path, nursery: trio.Nursery) -> None:
    answers = iter([ValueError("boom")])

    def handler() -> dict[str, int]:
        for error in answers:
            raise error
        return {"ok": 1}

    await nursery.start(serve, path, telling(handler))
    with pytest.raises(CachefsError, match="ValueError: boom"):
        await trio.to_thread.run_sync(ask, path)
    assert await trio.to_thread.run_sync(ask, path) == {"ok": 1}


async def test_clients_that_leave_or_do_not_read_do_no_harm(
    path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await nursery.start(serve, path, telling(lambda: {"x": "y" * 10_000_000}))
    leaving = await trio.open_unix_socket(path)
    await leaving.aclose()
    idle = await trio.open_unix_socket(path)
    await idle.send_all(b'{"verb": "status"}\n')
    await trio.sleep(10)  # virtual time: the server has given up on the idle one
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(b"".join([chunk async for chunk in idle]))
    await idle.aclose()


async def test_a_verb_gets_its_arguments(path: Path, nursery: trio.Nursery) -> None:
    async def echo(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"got": arguments}

    await nursery.start(serve, path, {"echo": echo})
    arguments = {"path": "/ü", "quota_bytes": 1 << 62, "high": 0.5}
    reply = await trio.to_thread.run_sync(ask, path, "echo", arguments)
    assert reply == {"got": arguments}


async def test_an_expected_failure_is_told_and_not_logged(
    path: Path, nursery: trio.Nursery
) -> None:
    async def fail(arguments: dict[str, Any]) -> dict[str, Any]:
        raise CacheDirError("the directory is on fire; put it out")

    await nursery.start(serve, path, {"fail": fail})
    with pytest.raises(CachefsError, match=r"^the directory is on fire; put it out$"):
        await trio.to_thread.run_sync(ask, path, "fail")


async def test_an_unknown_verb(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, {})
    with pytest.raises(CachefsError, match='the daemon doesn\'t know "brew"; it is of another'):
        await trio.to_thread.run_sync(ask, path, "brew")


@pytest.mark.parametrize(
    "request_line",
    [b"GET / HTTP/1.1\r\n", b"[]\n", b"{}\n", b'{"verb": 1}\n', b"\xff\n", b"[" * 60_000 + b"\n"],
)
async def test_a_request_that_is_none(
    path: Path, nursery: trio.Nursery, request_line: bytes
) -> None:
    await nursery.start(serve, path, telling(dict))
    assert "a request is one line of JSON" in (await sent(path, request_line))["error"]
    assert await sent(path, b'{"verb": "status"}\n') == {}


async def test_a_request_that_is_too_long(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve, path, telling(dict))
    assert "longer than" in (await sent(path, b"x" * (MAX_REQUEST_BYTES + 1)))["error"]


async def test_a_client_that_sends_nothing_is_dropped(
    path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await nursery.start(serve, path, telling(dict))
    assert await sent(path, b"") is None
    assert await sent(path, b'{"verb": "status"}') is None
    assert trio.current_time() < 10


def test_a_silent_daemon_is_given_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(CachefsError, match=r"did not answer .* within 0.2 s"):
            ask(path, timeout_s=0.2)


@pytest.mark.parametrize("reply", [b"", b"nonsense", b"[]", b'"text"', b"\xff"])
def test_an_answer_that_is_none(path: Path, reply: bytes) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(reply)

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
