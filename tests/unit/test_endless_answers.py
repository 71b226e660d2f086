"""Answers of a store that are made of very many small parts: each parser gives up soon."""

import io

import pytest

from cachefs.origin.s3.exchange import BrokenAnswerError, Request, _Connection
from cachefs.origin.writable import BufferContent

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FINAL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = 100_000


def answer_in_a_thread(data: bytes) -> int:
    connection = object.__new__(_Connection)
    connection._answers = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    return connection._answer(Request("PUT", "/b/k", "", {}, BufferContent(b""))).status


def test_interim_answers_are_few() -> None:
    assert answer_in_a_thread(INTERIM * 10 + FINAL) == 200
    with pytest.raises(BrokenAnswerError):
        answer_in_a_thread(INTERIM * 11 + FINAL)


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
