"""Answers of a store that are made of very many small parts: each parser gives up soon."""

import io
from itertools import repeat

import pytest
import trio

from cachefs.origin.s3.exchange import BrokenAnswerError, Request, _Connection
from cachefs.origin.s3.fast_path.wire import ChunkedBody, UnusualError
from cachefs.origin.writable import BufferContent
from tests.fuzz.targets.http_write import _Exchanges

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FINAL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = 100_000


def answer_in_a_thread(data: bytes) -> int:
    connection = object.__new__(_Connection)
    connection._answers = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    return connection._answer(Request("PUT", "/b/k", "", {}, BufferContent(b""))).status


def answer_on_the_loop(data: bytes) -> int:
    async def ask() -> int:
        exchanges = _Exchanges(data)
        try:
            content = BufferContent(b"")
            return (await exchanges.send(Request("PUT", "/b/k", "", {}, content))).status
        finally:
            exchanges.close()
            for peer in exchanges.peers:
                peer.close()

    return trio.run(ask)


@pytest.mark.parametrize("ask", [answer_in_a_thread, answer_on_the_loop])
def test_interim_answers_are_few(ask) -> None:
    assert ask(INTERIM * 10 + FINAL) == 200
    with pytest.raises(BrokenAnswerError):
        ask(INTERIM * 11 + FINAL)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"0\r\n" + b"a: b\r\n" * ENDLESS + b"\r\n", id="trailers"),
        pytest.param(b"1\r\nx\r\n" * ENDLESS + b"0\r\n\r\n", id="chunks"),
    ],
)
def test_parts_of_a_body_are_few(body: bytes) -> None:
    assert answer_in_a_thread(CHUNKED + b"3\r\nabc\r\n0\r\na: b\r\n\r\n") == 200
    with pytest.raises(BrokenAnswerError):
        answer_in_a_thread(CHUNKED + body)


def test_a_body_may_come_byte_by_byte() -> None:
    body = b"5;a=b\r\nhello\r\n" * 100 + b"0\r\n\r\n"
    chunks = ChunkedBody()
    found = [chunks.take(body[at : at + 1]) for at in range(len(body))]
    assert found == [*repeat(None, len(body) - 1), b"hello" * 100]


def test_the_chunks_of_an_error_are_few() -> None:
    with pytest.raises(UnusualError):
        ChunkedBody().take(b"1\r\nx\r\n" * 1001 + b"0\r\n\r\n")
