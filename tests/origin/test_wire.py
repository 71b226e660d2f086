"""The engine for HTTP: what it sends, what it accepts, its bounds, and when a request ends."""

import contextlib
import errno
import hashlib
import os
import resource
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial

import pytest
import trio

from cachefs.origin.http._engine import Engine, Transfer
from cachefs.origin.http.wire import (
    Answer,
    Bounds,
    BrokenAnswerError,
    Expected,
    Fed,
    GoOn,
    Request,
    Route,
    TooLongAnswerError,
    Wire,
)
from cachefs.types import Reply
from tests.cache.harness import until
from tests.servers.told_http import ToldHttp, endless

BODY = bytes(range(256)) * 400
BOUNDS = Bounds(connect_s=5, idle_s=60, total_s=60, most_bytes=1 << 20)
ETAG = 'etag: "v"\r\n'


def told(body: bytes = BODY, status: str = "200 OK", headers: str = ETAG) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def chunked(*chunks: bytes, headers: str = "", trailers: bytes = b"") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n{headers}\r\n".encode()
    parts = [b"%x;ext=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return b"".join([head, *parts, b"0\r\n", trailers, b"\r\n"])


class Into:
    """A sink of so many bytes that notes what it is asked."""

    follow = None

    def __init__(
        self, size: int = len(BODY), decision: GoOn | None = None, expected: Expected | None = None
    ) -> None:
        self.room = bytearray(size)
        self.decision = decision
        self.expected = expected
        self.asked: list[tuple[int, Mapping[str, str]]] = []

    def begin(self, status: int, headers: Mapping[str, str]) -> GoOn | None:
        self.asked.append((status, headers))
        return self.decision


def fed(body: bytes, on_read: Callable[[], None] = lambda: None) -> Fed:
    def read(offset: int, length: int) -> bytes:
        on_read()
        return body[offset : offset + length]

    return Fed(len(body), read)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    opened = Wire(1, 4)
    yield opened
    opened.close()


@pytest.fixture
async def server(nursery: trio.Nursery) -> AsyncIterator[ToldHttp]:
    yield await ToldHttp(told()).start(nursery)
    nursery.cancel_scope.cancel()


async def serving(
    nursery: trio.Nursery, serve_one: Callable[[trio.SocketStream], Awaitable[None]]
) -> str:
    """Serve connections, and return the address."""
    serve = partial(trio.serve_tcp, serve_one, 0, host="127.0.0.1")
    listeners = await nursery.start(serve)
    return f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/"


async def ask(
    wire: Wire,
    server: ToldHttp,
    sink: Into | None = None,
    method: str = "GET",
    bounds: Bounds = BOUNDS,
    body: bytes | Fed | None = None,
    wants_md5: bool = False,
    path: str = "/b/key",
) -> Answer:
    with trio.fail_after(120):
        request = Request(method, f"{server.url}{path}", {"x-a": "1"}, bounds, Route(), body)
        return await wire.send(request, sink, wants_md5)


async def test_requests_use_one_connection(wire: Wire, server: ToldHttp) -> None:
    answers = [await ask(wire, server) for _ in range(3)]
    assert [(answer.status, answer.body, answer.headers["etag"]) for answer in answers] == [
        (200, BODY, '"v"')
    ] * 3
    assert [answer.was_kept for answer in answers] == [False, True, True]
    assert server.connections == 1


async def test_only_what_is_given_is_sent(wire: Wire, server: ToldHttp) -> None:
    await ask(wire, server, path="/b/a/../%C3%A9//./x?prefix=%2F..&y")
    sent = [b"GET /b/a/../%C3%A9//./x?prefix=%2F..&y HTTP/1.1"]
    assert server.heads[0].split(b"\r\n") == [*sent, b"Host: 127.0.0.1:%d" % server.port, b"x-a: 1"]


@pytest.mark.parametrize("status", ["200 OK", "401 No", "407 No", "301 Moved", "426 Upgrade"])
async def test_no_answer_changes_the_next_request(
    status: str, wire: Wire, server: ToldHttp
) -> None:
    server.pieces[:] = [
        told(
            status=status,
            headers=(
                "set-cookie: a=b\r\nlocation: http://127.0.0.1:1/\r\nrefresh: 0;url=/other\r\n"
                "strict-transport-security: max-age=999\r\nclear-site-data: *\r\n"
                'alt-svc: h2="127.0.0.1:1"\r\nupgrade: h2c\r\nconnection: keep-alive\r\n'
                "www-authenticate: Negotiate, NTLM, Basic\r\nproxy-authenticate: Negotiate\r\n"
            ),
        )
    ]
    for _ in range(2):
        assert (await ask(wire, server)).status == int(status[:3])
    assert server.heads[0] == server.heads[1]
    assert len(server.heads) == 2


async def test_a_header_can_not_bring_another_one(wire: Wire, server: ToldHttp) -> None:
    for headers in ({"a": "1\r\nb: 2"}, {"a": "1\nb: 2"}, {"a": "\0"}):
        with pytest.raises(ValueError, match="not printable"):
            await wire.send(Request("GET", server.url, headers, BOUNDS))
    with pytest.raises(ValueError, match="not printable"):
        await wire.send(Request("GET", f"{server.url}/a b\r\nc: d", {}, BOUNDS))
    assert not server.heads


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
async def test_bodies_from_memory(method: str, wire: Wire, server: ToldHttp) -> None:
    server.pieces = [told(b"")]
    for body in (b"", b"a", BODY, BODY * 40):
        await ask(wire, server, method=method, body=body)
        assert server.requests[-1][1] == body
        assert b"content-length: %d" % len(body) in server.heads[-1].lower()
    assert b"content-type" not in b"".join(server.heads).lower()
    assert b"expect" not in b"".join(server.heads).lower()
    assert server.connections == 1


@pytest.mark.parametrize("size", [0, 1, len(BODY), 5 << 20])
async def test_a_body_that_is_read_while_it_is_sent(
    wire: Wire, server: ToldHttp, size: int
) -> None:
    server.pieces = [told(b"")]
    body = (BODY * 60)[:size]
    await ask(wire, server, method="PUT", body=fed(body))
    assert server.requests[-1][1] == body
    assert b"content-length: %d" % size in server.heads[-1].lower()


async def test_a_body_is_read_again_for_a_new_connection(wire: Wire, server: ToldHttp) -> None:
    body = BODY * 20
    await ask(wire, server)
    server.answers = [[None]]
    assert (await ask(wire, server, method="PUT", body=fed(body))).body == BODY
    assert [sent for _, sent in server.requests] == [b"", body, body]


@pytest.mark.parametrize("is_fed", [True, False])
async def test_a_kept_connection_that_ends_while_a_body_is_sent(
    wire: Wire, nursery: trio.Nursery, is_fed: bool
) -> None:
    """The server answers one request on each connection, and closes it in the next one."""
    whole: list[bytes] = []

    async def serve_one(stream: trio.SocketStream) -> None:
        seen = b""
        while not seen.endswith(b"end"):
            seen += await stream.receive_some()
        whole.append(seen.partition(b"\r\n\r\n")[2])
        await stream.send_all(told(b""))
        await stream.receive_some(100)

    url = await serving(nursery, serve_one)
    body = os.urandom(2 << 20) + b"end"
    for _ in range(10):
        for sent in (b"end", fed(body) if is_fed else body):
            answer = await wire.send(Request("PUT", url, {}, BOUNDS, Route(), sent))
            assert answer.status == 200
        assert whole.pop() == body
    nursery.cancel_scope.cancel()


async def test_a_body_that_can_not_be_read(wire: Wire, server: ToldHttp) -> None:
    def read(offset: int, length: int) -> bytes:
        if offset > 1 << 20:
            raise OSError("the disk is broken")
        return bytes(length)

    with pytest.raises(OSError, match="the disk is broken"):
        await ask(wire, server, method="PUT", body=Fed(4 << 20, read))
    await until(lambda: server.open == 0)
    assert not server.requests


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_body_of_another_length(wire: Wire, server: ToldHttp, change: int) -> None:
    body = Fed(4 << 20, lambda offset, length: bytes(length + change * (offset > 0)))
    with pytest.raises(OSError, match="another length"):
        await ask(wire, server, method="PUT", body=body)
    await wire.workers.idle()
    assert not server.requests


async def test_no_thread_for_a_body(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        accepted: list[socket.socket] = []

        def fail(*_: object) -> None:
            accepted.append(listener.accept()[0])
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(wire.workers, "begin", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            await wire.send(Request("PUT", url, {}, BOUNDS, Route(), fed(bytes(100))))
        with accepted[0] as connection:
            connection.settimeout(10)
            while connection.recv(1000):
                pass


@pytest.mark.parametrize("header", ["", "connection: close\r\n"])
async def test_an_answer_before_the_body(wire: Wire, nursery: trio.Nursery, header: str) -> None:
    """The server refuses a request after its head, and takes no more of it."""
    answered = threading.Event()

    def read(_: int, length: int) -> bytes:
        answered.wait(120)
        return bytes(length)

    async def refuse(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(told(b"no", "403 Forbidden", header))
        await stream.send_eof()  # a reset could overtake the answer
        while await stream.receive_some():
            pass

    for body in (Fed(4 << 20, read), bytes(4 << 20)):
        url = await serving(nursery, refuse)
        answer = await wire.send(Request("PUT", url, {}, BOUNDS, Route(), body))
        assert (answer.status, answer.body) == (403, b"no")
    answered.set()
    nursery.cancel_scope.cancel()


async def test_an_answer_before_a_reset(wire: Wire) -> None:
    """The server refuses a request and closes the connection, while the body is being sent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                with accepted:
                    accepted.recv(300_000)
                    accepted.sendall(told(b"no", "403 Forbidden"))

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    for _ in range(100):
        answer = await wire.send(Request("PUT", url, {}, BOUNDS, Route(), fed(bytes(8 << 20))))
        assert (answer.status, answer.body) == (403, b"no")
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


async def test_a_slow_reader_of_a_body_is_no_silence(wire: Wire, server: ToldHttp) -> None:
    def read(_: int, length: int) -> bytes:
        time.sleep(0.5)
        return bytes(length)

    answer = await ask(wire, server, None, "PUT", Bounds(5, 0.2), Fed(1 << 20, read))
    assert answer.status == 200


async def test_what_was_read_and_is_sent_later_counts(wire: Wire, nursery: trio.Nursery) -> None:
    seen: list[str] = []
    body = fed(bytes(6 << 20), lambda: seen.append("read"))

    async def take_slowly(stream: trio.SocketStream) -> None:
        _, _, begin = (await stream.receive_some(65536)).partition(b"\r\n\r\n")
        left = (6 << 20) - len(begin)
        while left:
            left -= len(await stream.receive_some(min(left, 65536)))
            await trio.sleep(0.005)
        await stream.send_all(told(b""))

    url = await serving(nursery, take_slowly)
    sent = body._replace(on_sent=lambda: seen.append("sent"))
    await wire.send(Request("PUT", url, {}, BOUNDS, Route(), sent))
    assert seen[-1] == "sent"
    nursery.cancel_scope.cancel()


async def test_the_end_of_the_wire_ends_the_readers_of_bodies(server: ToldHttp) -> None:
    server.pieces = [trio.Event()]
    wire, read = Wire(1, 4), threading.Event()

    async def fails(body: Fed) -> None:
        with pytest.raises(ConnectionError):
            await ask(wire, server, method="PUT", body=body)

    async with trio.open_nursery() as nursery:
        for size in (1000, 64 << 20):
            nursery.start_soon(fails, fed(bytes(size), read.set))
        await until(read.is_set)
        wire.close()
    await wire.workers.idle()


async def test_a_put_without_a_body_says_so(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [told(b"")]
    await ask(wire, server, method="DELETE")
    assert b"content-length" not in server.heads[-1].lower()


async def test_an_expected_object_goes_to_its_room(wire: Wire, server: ToldHttp) -> None:
    sink = Into(expected=(200, (("etag", '"v"'), ("content-length", str(len(BODY))))))
    answer = await ask(wire, server, sink, wants_md5=True)
    assert (bytes(sink.room), sink.asked) == (BODY, [])
    assert (answer.filled_bytes, answer.body) == (len(BODY), b"")
    assert answer.md5 == hashlib.md5(BODY, usedforsecurity=False).digest()


@pytest.mark.parametrize(
    "answer",
    [
        told(headers='etag: "w"\r\n'),
        told(headers=""),
        told(headers='etag: "v"\r\netag: "w"\r\n'),
        told(headers=f"{ETAG}x-goog-stored-content-encoding: gzip\r\n"),
        told(status="206 Partial Content"),
        chunked(BODY[:7], BODY[7:], headers=ETAG),
    ],
)
async def test_the_caller_decides_about_another_answer(
    answer: bytes, wire: Wire, server: ToldHttp
) -> None:
    server.pieces = [answer]
    expected = (200, (("etag", '"v"'), ("content-length", str(len(BODY)))))
    sink = Into(expected=expected, decision=GoOn())
    found = await ask(wire, server, sink)
    assert (found.filled_bytes, bytes(sink.room), len(sink.asked)) == (len(BODY), BODY, 1)
    refuses = Into(expected=expected)
    found = await ask(wire, server, refuses)
    assert (found.status, found.filled_bytes) == (sink.asked[0][0], 0)
    assert not any(refuses.room)
    await until(lambda: server.open == 0)


async def test_what_the_caller_raises_ends_the_request(wire: Wire, server: ToldHttp) -> None:
    class Raises(Into):
        def begin(self, status: int, headers: Mapping[str, str]) -> GoOn | None:
            raise KeyError(status)

    with pytest.raises(KeyError, match="200"):
        await ask(wire, server, Raises())
    await until(lambda: server.open == 0)


async def test_a_part_of_a_longer_body(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [told(), *endless(b"x" * 65536)]
    server.pieces[0] = told().replace(b"length: 102400", b"length: 99999999999")
    sink = Into(1000, GoOn(skip_bytes=70_000, stops_when_full=True))
    answer = await ask(wire, server, sink)
    assert bytes(sink.room) == BODY[70_000:71_000]
    assert answer.filled_bytes == 1000
    assert server.sent_bytes < 32 << 20


async def test_no_byte_more_than_the_room(wire: Wire, server: ToldHttp) -> None:
    for answer in (told(), chunked(BODY)):
        server.pieces = [answer]
        with pytest.raises(TooLongAnswerError):
            await ask(wire, server, Into(len(BODY) - 1, GoOn()))


async def test_an_empty_object(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [told(b"")]
    sink = Into(0, GoOn())
    assert (await ask(wire, server, sink)).filled_bytes == 0
    assert len(sink.asked) == 1


async def test_errors_have_their_bodies(wire: Wire, server: ToldHttp) -> None:
    for status in ("404 Not Found", "503 Slow Down", "307 Temporary Redirect"):
        server.pieces = [told(b"<Code>X</Code>", status, "location: http://127.0.0.1:1/\r\n")]
        answer = await ask(wire, server, Into(decision=GoOn()))
        assert (answer.status, answer.body) == (int(status[:3]), b"<Code>X</Code>")
    assert server.connections == 1  # and no redirect is followed


async def test_another_protocol_is_not_waited_for(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"]
    for sink in (None, Into(decision=GoOn())):
        with pytest.raises(BrokenAnswerError):
            await ask(wire, server, sink, bounds=Bounds(5, 5, 5))


async def test_heads_without_bodies(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n"]
    answer = await ask(wire, server, method="HEAD")
    assert answer.headers["content-length"] == "999999999999"
    server.pieces = [b"HTTP/1.1 204 No Content\r\n\r\n"]
    assert (await ask(wire, server, method="DELETE")).status == 204
    server.pieces = [b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"]
    assert (await ask(wire, server)).status == 304
    assert server.connections == 1


async def test_interim_answers_are_skipped(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" * 3 + told()]
    answer = await ask(wire, server)
    assert (answer.status, answer.body, "x" in answer.headers) == (200, BODY, False)


HEAD = b"HTTP/1.1 200 OK\r\n"
BROKEN: dict[str, bytes] = {
    "no http": b"220 ftp ready\r\n\r\n",
    "http 0.9": b"<html>" * 100,
    "http 2": b"HTTP/2 200 OK\r\ncontent-length: 1\r\n\r\nx",
    "a status of letters": b"HTTP/1.1 2x0 OK\r\ncontent-length: 1\r\n\r\nx",
    "no status": b"HTTP/1.1\r\ncontent-length: 1\r\n\r\nx",
    "two lengths": HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    "a length of letters": HEAD + b"content-length: 1x\r\n\r\nxx",
    "a negative length": HEAD + b"content-length: -1\r\n\r\nxx",
    "packed on the way": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "no chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc",
    **{
        f"a chunk of {size.decode()!a}": HEAD
        + b"transfer-encoding: chunked\r\n\r\n%s\r\n%s\r\n0\r\n\r\n" % (size, b"x" * 16)
        for size in (b"1_0", b"+10", b"-10", b" 10", b"0x10", b"", "²".encode())
    },
    "a chunk of petabytes": HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc",
    "a head without end": HEAD + b"x: y\r\n" * 101,
    "a long line": HEAD + b"x: " + b"y" * (65 << 10) + b"\r\n\r\n",
    "interim answers without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 12,
    "trailers without end": HEAD
    + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    + b"a: b\r\n" * 12_000
    + b"\r\n",
    "a head that ends with half an empty line": HEAD + b"x: y\r\n\rz\r\nabc",
    "a status within a head": HEAD + b"HTTP/1.1 206 a: b\r\ncontent-length: 1\r\n\r\nx",
    "a final status within an interim head": b"HTTP/1.1 100 OK\r\n"
    + told(b"x").replace(b"200 OK", b"200 a: b")
    + told(b"y"),
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\nx",
    "a short body": HEAD + b"content-length: 10\r\n\r\nabc",
    "half a head": HEAD + b"content-le",
    "half a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\na\r\nabc",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_answers(name: str, wire: Wire, server: ToldHttp) -> None:
    server.pieces = [BROKEN[name], None]
    for sink in (None, Into(100, GoOn())):
        with pytest.raises((BrokenAnswerError, ConnectionError)):
            await ask(wire, server, sink, bounds=BOUNDS._replace(idle_s=5))
    assert len(server.requests) == 2  # none is sent again
    server.pieces = [told()]
    assert (await ask(wire, server)).body == BODY


@pytest.mark.parametrize(
    "start",
    [
        HEAD + b"content-length: 9999999999999999\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffff\r\n",
        HEAD + b"\r\n",
    ],
)
async def test_endless_bodies(start: bytes, wire: Wire, server: ToldHttp) -> None:
    server.pieces = [start, *endless(b"x" * 65536)]
    tracemalloc.start()
    with pytest.raises(TooLongAnswerError):
        await ask(wire, server)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert server.sent_bytes < 32 << 20
    error = start.replace(b"200 OK", b"503 Slow Down")
    server.pieces = [error, *endless(b"x" * 65536)]
    assert (await ask(wire, server)).status == 503


async def test_a_silent_server(wire: Wire, server: ToldHttp) -> None:
    never = trio.Event()
    for pieces in ([never], [told()[:50], never], [told()[:2000], never]):
        server.pieces = list(pieces)
        with pytest.raises(TimeoutError):
            await ask(wire, server, bounds=Bounds(5, 0.2, 60))
    assert len(server.requests) == 3


async def test_a_drip_ends(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [told()[:-9000], *[b"x", 0.02] * 4000]
    with pytest.raises(TimeoutError):
        await ask(wire, server, bounds=Bounds(5, 30, 0.3))


async def test_time_without_progress_counts_bytes_that_are_sent(
    wire: Wire, nursery: trio.Nursery
) -> None:
    """A body that the server takes slowly is no silence."""
    received = 0

    async def take(stream: trio.SocketStream) -> None:
        nonlocal received
        while received < 16 << 20 and (data := await stream.receive_some(1 << 18)):
            received += len(data)
            await trio.sleep(0.01)
        await stream.send_all(told(b""))

    url = await serving(nursery, take)
    for body in (bytes(16 << 20), fed(bytes(16 << 20))):
        received = 0
        request = Request("PUT", url, {}, Bounds(5, 0.4), Route(), body)
        assert (await wire.send(request)).status == 200
    nursery.cancel_scope.cancel()


async def test_time_without_progress_counts_bytes_that_are_sent_once_more(
    wire: Wire, nursery: trio.Nursery
) -> None:
    """A kept connection ends after the whole body, and the next one takes it slowly."""
    body = bytes(16 << 20)
    connections = 0

    async def take(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        is_slow = connections == 2
        if not is_slow:
            await stream.receive_some()
            await stream.send_all(told(b""))
        received = 0
        while received < len(body) and (data := await stream.receive_some(1 << 18)):
            received += len(data)
            await trio.sleep(0.01 if is_slow else 0)
        if is_slow:
            await stream.send_all(told(b""))

    serve = trio.serve_tcp
    listeners = await nursery.start(lambda task_status: serve(take, 0, task_status=task_status))
    url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/"
    assert (await wire.send(Request("GET", url, {}, BOUNDS))).status == 200
    request = Request("PUT", url, {}, Bounds(5, 0.4), Route(), body)
    assert (await wire.send(request)).status == 200
    assert connections == 2
    nursery.cancel_scope.cancel()


async def test_a_kept_connection_that_the_server_has_closed(wire: Wire, server: ToldHttp) -> None:
    await ask(wire, server)
    server.answers = [[None]]
    assert (await ask(wire, server, method="PUT", body=BODY)).body == BODY
    assert [body for _, body in server.requests] == [b"", BODY, BODY]
    assert server.connections == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
async def test_what_comes_after_an_answer_answers_nothing(
    method: str, wire: Wire, server: ToldHttp
) -> None:
    more = trio.Event()
    length = 0 if method == "HEAD" else 3
    server.answers = [[told(b"abc").replace(b"abc", bytes(length)), more, told(b"other")]]
    await ask(wire, server, method=method)
    sent_bytes = server.sent_bytes
    more.set()
    await until(lambda: server.sent_bytes > sent_bytes)
    assert (await ask(wire, server, method="PUT", body=BODY)).body == BODY
    assert [body for _, body in server.requests] == [b"", BODY]
    assert server.connections == 2


@pytest.mark.parametrize("first", [told(b"abc"), told(b""), chunked(b"abc")])
async def test_what_comes_with_an_answer_answers_nothing(
    first: bytes, wire: Wire, server: ToldHttp
) -> None:
    for method in ("GET", "PUT", "HEAD"):
        server.answers = [[first + told(b"other")]]
        await ask(wire, server, method=method)
        assert (await ask(wire, server)).body == BODY


async def test_a_new_connection_that_the_server_closes(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [None]
    with pytest.raises(ConnectionError):
        await ask(wire, server, method="PUT", body=BODY)
    assert len(server.requests) == 1


async def test_no_server(wire: Wire) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(ConnectionError):
            await wire.send(Request("GET", url, {}, BOUNDS))
    with pytest.raises(OSError, match="no address"):
        await wire.send(Request("GET", "http://host.invalid/", {}, BOUNDS))


async def test_a_cancelled_request_closes_its_connection(wire: Wire, server: ToldHttp) -> None:
    server.pieces = [trio.Event()]
    for body in (None, BODY, fed(BODY * 10)):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, wire, server, Into(), "PUT", BOUNDS, body)
                await until(lambda: server.open == 1 and len(server.requests) > 0)
                scope.cancel()
        assert scope.cancelled_caught
        await until(lambda: server.open == 0)
        server.requests.clear()


async def test_many_at_a_time(wire: Wire, server: ToldHttp) -> None:
    go = trio.Event()
    server.pieces = [go, told()]
    done = 0

    async def one() -> None:
        nonlocal done
        sink = Into(decision=GoOn())
        answer = await ask(wire, server, sink, wants_md5=True)
        assert bytes(sink.room) == BODY
        assert answer.md5 == hashlib.md5(BODY, usedforsecurity=False).digest()
        done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(one)
        await until(lambda: len(server.requests) == 40)
        go.set()
    assert (done, server.connections) == (40, 40)


class Followed(Into):
    """Notes how many bytes have come whenever it is told that more have."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__(decision=GoOn())
        self.counts = counts

    def follow(self, count: Callable[[], int]) -> Callable[[], None]:  # type: ignore[override]
        return lambda: self.counts.append(count())


async def test_progress_is_told(wire: Wire, server: ToldHttp) -> None:
    rest = trio.Event()
    counts: list[int] = []

    server.pieces = [told()[:50_000], rest, told()[50_000:]]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, wire, server, Followed(counts))
        await until(lambda: counts)
        rest.set()
    assert 40_000 < counts[0] < 50_000


async def test_progress_of_many_is_told_by_one_task(wire: Wire, server: ToldHttp) -> None:
    await ask(wire, server, Followed([]))
    living = trio.lowlevel.current_statistics().tasks_living
    for _ in range(10):
        await ask(wire, server, Followed([]))
    assert trio.lowlevel.current_statistics().tasks_living <= living


async def test_no_other_program_inherits_a_connection(wire: Wire, server: ToldHttp) -> None:
    await ask(wire, server)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.getpeername()[1:] == (server.port,):
                assert not os.get_inheritable(int(name))
                return
    raise AssertionError("there is no connection")


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open at most so many more files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.parametrize("count", [0, 1])
def test_no_engine_without_descriptors(count: int) -> None:
    """One that can't be woken would send each request a minute late."""
    Engine(1).close()
    before = os.listdir("/proc/self/fd")
    with descriptors_left(count), pytest.raises(OSError) as raised:
        Engine(1)
    assert raised.value.errno == errno.EMFILE
    assert os.listdir("/proc/self/fd") == before


async def test_no_connection_without_descriptors(wire: Wire, server: ToldHttp) -> None:
    with pytest.raises(ConnectionError):  # the engine's own descriptors are there
        await wire.send(Request("GET", "http://127.0.0.1:1/", {}, BOUNDS))
    by_name = Request("GET", f"http://localhost:{server.port}/", {}, BOUNDS)
    with descriptors_left(0):
        with pytest.raises(ConnectionError):
            await ask(wire, server)
        with pytest.raises(OSError):
            await wire.send(by_name)
    assert (await ask(wire, server)).body == BODY
    assert (await wire.send(by_name)).body == BODY


async def test_the_environment_decides_nothing(
    wire: Wire, server: ToldHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await ask(wire, server)).status == 200


async def test_a_proxy_gets_the_request(wire: Wire, server: ToldHttp) -> None:
    proxy = Route(f"http://user:pass%40word@127.0.0.1:{server.port}")
    await wire.send(Request("GET", "http://store.invalid/b/../k", {}, BOUNDS, proxy))
    lines = server.heads[0].split(b"\r\n")
    assert lines[0] == b"GET http://store.invalid/b/../k HTTP/1.1"
    assert b"Proxy-Authorization: Basic dXNlcjpwYXNzQHdvcmQ=" in lines
    assert "pass" not in repr(proxy)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 403 No\r\ncontent-length: 999999999\r\n\r\n", b"x" * 65536),
        (b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 10_000),
    ],
)
async def test_a_proxy_that_refuses(
    head: bytes, piece: bytes, wire: Wire, server: ToldHttp
) -> None:
    """The engine does not read on. Other requests would wait meanwhile."""
    server.pieces = [head, *endless(piece)]
    request = Request("GET", "https://store.invalid/k", {}, BOUNDS, Route(proxy=server.url))
    with pytest.raises(ConnectionError, match=r"closed \((403|503|0)\)"):
        await wire.send(request)
    assert server.heads[0].startswith(b"CONNECT store.invalid:443")
    await until(lambda: server.open == 0)
    assert server.sent_bytes < 16 << 20


async def test_closed(server: ToldHttp) -> None:
    wire = Wire(2)
    await ask(wire, server)
    server.pieces = [trio.Event()]

    async def fails() -> None:
        with pytest.raises(ConnectionError):
            await ask(wire, server)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails)
        nursery.start_soon(fails)
        await until(lambda: server.open >= 2)
        wire.close()
    await until(lambda: server.open == 0)
    with pytest.raises(ConnectionError):
        await ask(wire, server)


DIGEST = hashlib.md5(BODY).digest()
EXPECTED: Expected = (200, (("etag", '"v"'), ("content-length", str(len(BODY)))))


async def begun(
    wire: Wire, server: ToldHttp, md5: bytes | None = DIGEST, part: tuple[int, int] = (7, 100)
) -> tuple[bool, bytes]:
    """Begin a request with a reply, and return whether it was sent, and what came."""
    end, device = os.pipe()
    ended: list[Transfer] = []
    try:
        request = Request("GET", f"{server.url}/x", {}, BOUNDS)
        sink = Into(expected=EXPECTED)
        try:
            wire.begin(request, sink, md5, ended.append, Reply(device, 12, *part))
        finally:
            os.close(device)  # the engine has its own
        await until(lambda: bool(ended))
        wire.close()
        return ended[0].is_replied, os.read(end, 1 << 16)
    finally:
        os.close(end)


async def test_a_reply_to_the_kernel(wire: Wire, server: ToldHttp) -> None:
    """The header of FUSE: length, error, number of the request (linux/fuse.h, fuse_out_header)."""
    is_replied, sent = await begun(wire, server)
    assert is_replied
    assert sent == struct.pack("=IiQ", 16 + 100, 0, 12) + BODY[7:107]


@pytest.mark.parametrize(
    "answer",
    [
        told(headers='etag: "other"\r\n'),
        told(BODY[:-1]),
        told()[:-1],
        told(BODY[1:] + b"x"),
        told(b"", "404 Not Found"),
        told(status="206 Partial Content"),
        b"",
    ],
)
async def test_no_reply_but_with_the_right_bytes(
    wire: Wire, server: ToldHttp, answer: bytes
) -> None:
    server.pieces = [answer, None]
    assert await begun(wire, server) == (False, b"")


async def test_a_reply_that_the_kernel_refuses(wire: Wire, server: ToldHttp) -> None:
    """Somebody else must answer then."""
    ended: list[Transfer] = []
    request = Request("GET", f"{server.url}/x", {}, BOUNDS)
    with open("/dev/null", "rb") as not_writable:
        reply = Reply(not_writable.fileno(), 12, 0, 5)
        wire.begin(request, Into(expected=EXPECTED), None, ended.append, reply)
        await until(lambda: bool(ended))
    assert not ended[0].is_replied


@pytest.mark.parametrize("part", [(-1, 5), (0, len(BODY) + 1), (len(BODY), 1), (0, -1)])
async def test_a_reply_must_be_a_part_of_the_sink(
    wire: Wire, server: ToldHttp, part: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="a part of the sink"):
        await begun(wire, server, part=part)
    assert not server.heads


async def test_a_patient_transfer_wakes_the_loop_with_others_or_soon(
    wire: Wire, server: ToldHttp
) -> None:
    ended: list[Transfer] = []
    request = Request("GET", f"{server.url}/x", {}, BOUNDS)

    def begin() -> None:
        sink = Into(expected=EXPECTED)
        wire.begin(request, sink, None, ended.append, is_patient=True)

    begin()
    await until(lambda: len(ended) == 1)  # alone
    for _ in range(30):
        begin()
    await until(lambda: len(ended) == 31)
