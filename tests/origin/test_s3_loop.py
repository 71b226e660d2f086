"""Small objects for readers, asked for on the loop: what comes, what is said, what is left."""

import hashlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import trio

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    NotFoundError,
    ObjectChangedError,
    OriginBusyError,
    OriginUnavailableError,
)
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.types import ObjectMeta
from tests.cache.harness import until

BODY = bytes(range(256)) * 400
E_TAG = f'"{hashlib.md5(BODY, usedforsecurity=False).hexdigest()}"'
META = ObjectMeta(len(BODY), 0, E_TAG)
Piece = bytes | float | trio.Event | None
"""A part of an answer, a pause in seconds, an event to wait for, or the end of the connection."""


def answer(
    body: bytes = BODY, status: str = "200 OK", headers: str = "", e_tag: str = E_TAG
) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\netag: {e_tag}\r\n{headers}\r\n"
    return head.encode() + body


class Server:
    """Answers with what it is told to, in pieces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = [answer()]
        self.answers: dict[bytes, list[bytes]] = {}
        """By method, instead of `pieces`."""
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, self._connection, 0, host="127.0.0.1")
            listeners = await nursery.start(serve)
            self.port = listeners[0].socket.getsockname()[1]
            task_status.started()

    async def _connection(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        seen = b""
        try:
            async for data in stream:
                seen += data
                while b"\r\n\r\n" in seen:
                    request, _, seen = seen.partition(b"\r\n\r\n")
                    self.requests.append(request)
                    for piece in self.answers.get(request.split(b" ")[0], self.pieces):
                        if piece is None:
                            return
                        if isinstance(piece, bytes):
                            await stream.send_all(piece)
                        elif isinstance(piece, trio.Event):
                            await piece.wait()
                        else:
                            await trio.sleep(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


@pytest.fixture
async def server(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.delenv("http_proxy", raising=False)
    server = Server()
    await nursery.start(server.serve)
    yield server
    nursery.cancel_scope.cancel()


@pytest.fixture
async def origin(server: Server) -> AsyncIterator[Origin]:
    endpoint = f"http://127.0.0.1:{server.port}"
    opened = open_origin("s3://b", OriginOptions(endpoint=endpoint, anonymous=True))
    yield opened
    await opened.aclose()


async def read(origin: Origin) -> bytes:
    with trio.fail_after(300):
        return bytes(await origin.read("a b/é", META, 0, len(BODY)))


async def test_one_connection_is_enough_for_one_reader(server: Server, origin: Origin) -> None:
    for _ in range(5):
        assert await read(origin) == BODY
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /b/a%20b/%C3%A9 HTTP/1.1\r\n")
    assert f"if-match: {E_TAG}".encode() in server.requests[0]
    assert (origin.counters.gets, origin.counters.get_bytes) == (5, 5 * len(BODY))


async def test_readers_have_connections_of_their_own(server: Server, origin: Origin) -> None:
    all_ask = trio.Event()
    server.pieces = [all_ask, answer()]

    async def check() -> None:
        for _ in range(3):
            assert await read(origin) == BODY

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(check)
        await until(lambda: len(server.requests) == 8)
        all_ask.set()
    assert server.connections == 8


@pytest.mark.parametrize("cuts", [[1], [10, 40], [70, 71, 72], [5000, 102_000], [300, 400, 60_000]])
async def test_an_answer_in_pieces(server: Server, origin: Origin, cuts: list[int]) -> None:
    whole = answer()
    server.pieces = []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        server.pieces += [whole[begin:end], 0.01]
    for _ in range(2):
        assert await read(origin) == BODY
    assert server.connections == 1


async def test_a_connection_that_the_server_closed_meanwhile(
    server: Server, origin: Origin
) -> None:
    assert await read(origin) == BODY
    server.pieces = [answer(), None]
    assert await read(origin) == BODY
    await trio.sleep(0.02)
    for _ in range(3):
        assert await read(origin) == BODY
        await trio.sleep(0.02)
    assert len(server.requests) == origin.counters.gets == 5


async def test_a_server_that_closes_each_connection(server: Server, origin: Origin) -> None:
    server.pieces = [answer(headers="connection: close\r\n")]
    for _ in range(3):
        assert await read(origin) == BODY
    assert server.connections == 3


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        ("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>", NotFoundError),
        ("412 Precondition Failed", b"", ObjectChangedError),
        ("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>", AccessDeniedError),
        ("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>", OriginBusyError),
        ("500 Oh", b"?", OriginUnavailableError),
    ],
)
async def test_what_the_server_says_is_asked_once(
    server: Server, origin: Origin, status: str, body: bytes, error: type[Exception]
) -> None:
    server.pieces = [answer(body, status, "retry-after: 7\r\n")]
    with pytest.raises(error) as caught:
        await read(origin)
    assert getattr(caught.value, "retry_after_s", 7) == 7
    gets = [request for request in server.requests if request.startswith(b"GET")]
    assert len(gets) == 1
    server.pieces = [answer()]
    assert await read(origin) == BODY


async def test_an_error_in_chunks(server: Server, origin: Origin) -> None:
    head = "HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n"
    server.pieces = [f"{head}28\r\n<Error><Code>NoSuchBucket</Code></Error>\r\n0\r\n\r\n".encode()]
    with pytest.raises(NotFoundError, match="bucket b does not exist"):
        await read(origin)
    assert len(server.requests) == 1
    server.pieces = [answer()]
    assert await read(origin) == BODY
    assert server.connections == 1


async def test_a_broken_error_in_chunks_costs_the_connection_only(
    server: Server, origin: Origin
) -> None:
    head = "HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n"
    for body in ("zz\r\n", "1\r\nab\r\n", "fffff\r\n" + "x" * 70_000, "0\r\nTrailer: x\r\n\r\n"):
        server.pieces = [f"{head}{body}".encode()]
        with pytest.raises(NotFoundError):
            await read(origin)
    server.pieces = [answer()]
    assert await read(origin) == BODY
    assert server.connections == 4


def _wrong_bytes() -> list[Piece]:
    return [answer(b"?" + BODY[1:])]


def _cut_short() -> list[Piece]:
    return [answer()[:-1], None]


def _too_long() -> list[Piece]:
    return [answer(BODY + b"?")]


def _another() -> list[Piece]:
    return [answer(e_tag='"0123456789abcdef0123456789abcdef"')]


def _no_http() -> list[Piece]:
    return [b"SSH-2.0-OpenSSH_9.2\r\n\r\n"]


def _endless_head() -> list[Piece]:
    return [b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 90_000]


def _two_lengths() -> list[Piece]:
    return [answer(headers="Content-Length: 5\r\n")]


@pytest.mark.parametrize(
    "pieces",
    [_wrong_bytes, _cut_short, _too_long, _another, _no_http, _endless_head, _two_lengths],
)
async def test_nothing_wrong_comes_through(
    server: Server, origin: Origin, pieces: Callable[[], list[Piece]]
) -> None:
    server.pieces = pieces()
    with pytest.raises((BadDataError, ObjectChangedError, OriginUnavailableError)):
        await read(origin)


LAST_MODIFIED = "last-modified: Sun, 22 Nov 2026 10:00:00 GMT\r\n"


@pytest.mark.parametrize(
    ("first", "has_bytes"),
    [
        (answer(headers=LAST_MODIFIED), True),
        (
            answer(
                status="206 Partial Content",
                headers=f"{LAST_MODIFIED}content-range: bytes 0-102399/102400\r\n",
            ),
            True,
        ),
        (
            answer(
                status="206 Partial Content",
                headers=f"{LAST_MODIFIED}content-range: bytes 0-102399/900000\r\n",
            ),
            False,
        ),
        (answer(b"?" + BODY[1:], headers=LAST_MODIFIED), False),
    ],
    ids=["whole", "range", "first part", "wrong bytes"],
)
async def test_a_look_up_may_bring_the_bytes(
    server: Server, origin: Origin, first: bytes, has_bytes: bool
) -> None:
    server.pieces = [first]
    meta, data = await origin.stat_and_read("k")
    assert isinstance(meta, ObjectMeta)
    assert meta.version == E_TAG
    assert meta.mtime_ns == 1_795_341_600 * 1_000_000_000
    assert (None if data is None else bytes(data)) == (BODY if has_bytes else None)
    assert len(server.requests) == 1
    assert b"range: bytes=0-262143" in server.requests[0]


@pytest.mark.parametrize(
    "first",
    [
        answer(b"", status="416 Range Not Satisfiable"),
        answer(headers="last-modified: yesterday\r\n"),
        answer(b"x" * 300_000, headers=LAST_MODIFIED),
        answer(headers=f"{LAST_MODIFIED}content-range: bytes 9-99/102400\r\n"),
        answer(status="206 Partial Content", headers=LAST_MODIFIED),
        answer(
            status="206 Partial Content",
            headers=f"{LAST_MODIFIED}content-range: bytes 0-99/102400\r\n",
        ),
        answer(
            status="206 Partial Content",
            headers=f"{LAST_MODIFIED}content-range: bytes 0-102399/9\r\n",
        ),
        answer(b"", status="302 Found"),
    ],
    ids=[
        "empty",
        "no time",
        "no ranges",
        "another range",
        "no range said",
        "a shorter range",
        "too small",
        "elsewhere",
    ],
)
async def test_a_look_up_that_is_unusual_is_asked_by_head(
    server: Server, origin: Origin, first: bytes
) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: 5\r\netag: {E_TAG}\r\n{LAST_MODIFIED}\r\n"
    server.answers = {b"GET": [first], b"HEAD": [head.encode()]}
    meta, data = await origin.stat_and_read("k")
    assert isinstance(meta, ObjectMeta)
    assert (meta.size_bytes, data) == (5, None)


async def test_an_answer_that_says_nothing(server: Server, origin: Origin) -> None:
    server.pieces = [b"HTTP/1.0 200 OK\r\n\r\n"]
    with pytest.raises(BadDataError, match="neither"):
        await read(origin)
    server.pieces = [answer()]
    assert await read(origin) == BODY


async def test_who_gives_up_leaves_nothing_behind(server: Server, origin: Origin) -> None:
    server.pieces = [answer()[:9000], trio.Event()]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, origin)
        await until(lambda: len(server.requests) == 1)
        nursery.cancel_scope.cancel()
    server.pieces = [answer()]
    assert await read(origin) == BODY
    assert server.connections == 2


def part_of(
    start: int, end: int, size_bytes: int = len(BODY), body: bytes | None = None, e_tag: str = E_TAG
) -> bytes:
    """The answer to a GET of some bytes."""
    found = BODY[start:end] if body is None else body
    told = f"content-range: bytes {start}-{end - 1}/{size_bytes}\r\n"
    return answer(found, "206 Partial Content", told, e_tag)


async def test_a_part_of_an_object_is_read_on_the_loop(server: Server, origin: Origin) -> None:
    server.pieces = [part_of(7000, 11096)]
    for _ in range(3):
        assert bytes(await origin.read("k", META, 7000, 4096)) == BODY[7000:11096]
    assert server.connections == 1
    assert b"range: bytes=7000-11095\r\n" in server.requests[0] + b"\r\n"
    assert f"if-match: {E_TAG}".encode() in server.requests[0]
    assert (origin.counters.gets, origin.counters.get_bytes) == (3, 3 * 4096)


@pytest.mark.parametrize(
    "wrong",
    [
        part_of(7000, 11096, e_tag='"0123456789abcdef0123456789abcdef"'),
        part_of(7000, 11096, body=BODY[:4095]),
        part_of(7000, 11096, body=BODY[:4097]),
        part_of(7001, 11097),
        answer(BODY[7000:11096], "206 Partial Content"),
    ],
    ids=["another version", "too short", "too long", "another part", "no range"],
)
async def test_no_wrong_part_comes_through(server: Server, origin: Origin, wrong: bytes) -> None:
    server.pieces = [wrong]
    with pytest.raises((BadDataError, ObjectChangedError)):
        with trio.fail_after(300):
            await origin.read("k", META, 7000, 4096)


async def test_a_part_is_taken_from_the_whole_object(
    server: Server, origin: Origin, expect_log
) -> None:
    expect_log("ignores Range")
    server.pieces = [answer()]
    assert bytes(await origin.read("k", META, 7000, 4096)) == BODY[7000:11096]


async def test_a_part_of_a_replaced_object_is_refused(server: Server, origin: Origin) -> None:
    server.pieces = [answer(b"", "412 Precondition Failed")]
    with pytest.raises(ObjectChangedError):
        await origin.read("k", META, 7000, 4096)
    assert len([each for each in server.requests if each.startswith(b"GET")]) == 1
