"""Bodies of objects that are not what they should be cost an error, not the daemon."""

import hashlib
from collections.abc import AsyncIterator, Iterator

import pytest

from cachefs.errors import BadDataError, ObjectChangedError
from cachefs.origin.base import Origin
from cachefs.origin.body import Body
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.types import ObjectMeta
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3

MIB = 1 << 20
LARGE = ObjectMeta(3 * MIB, 1_793_613_600_000_000_000, '"one"')
HEADERS = {"Last-Modified": DATE, "ETag": '"one"'}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    with ToldS3(lambda asked: Answer(status=404)) as told:
        yield told


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[Origin]:
    opened = open_origin("s3://b", OriginOptions(endpoint=server.endpoint, anonymous=True))
    yield opened
    await opened.aclose()


def ranged(asked: Asked, size: int = LARGE.size_bytes) -> dict[str, str]:
    """Headers of the part that was asked for."""
    span = asked.headers["range"].removeprefix("bytes=")
    return HEADERS | {"Content-Range": f"bytes {span}/{size}"}


def endless() -> Iterator[bytes]:
    while True:
        yield bytes(MIB)


async def test_a_length_that_is_too_large_takes_no_memory(server: ToldS3, origin: Origin) -> None:
    server.answer = lambda asked: Answer(iter([b"x"]), headers=HEADERS, length=10**15)
    with pytest.raises(BadDataError, match="1000000000000000 bytes instead of"):
        await origin.read("f", LARGE, 0, LARGE.size_bytes)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_endless_body_is_not_read_to_its_end(
    server: ToldS3, origin: Origin, is_whole: bool
) -> None:
    server.answer = lambda asked: Answer(
        endless(), 200 if is_whole else 206, HEADERS if is_whole else ranged(asked), 10**15
    )
    with pytest.raises(BadDataError, match="instead of"):
        await origin.read("f", LARGE, 0, LARGE.size_bytes if is_whole else MIB)
    assert server.sent_bytes < 100 * MIB


@pytest.mark.parametrize("version", ['"a\x01b"', '"a\nb"', '"\x7f"', '"é"', "\x00", '"a'])
async def test_a_version_that_fits_in_no_header_is_compared(
    server: ToldS3, origin: Origin, version: str
) -> None:
    server.answer = lambda asked: Answer(b"data", headers=HEADERS)
    for size in (4, MIB):
        with pytest.raises((ObjectChangedError, BadDataError)):
            await origin.read("f", ObjectMeta(size, 0, version), 0, size)


async def test_bytes_without_the_expected_digest_are_not_kept(
    server: ToldS3, origin: Origin
) -> None:
    data = bytes(LARGE.size_bytes)
    e_tag = f'"{hashlib.md5(b"other", usedforsecurity=False).hexdigest()}"'
    meta = ObjectMeta(len(data), LARGE.mtime_ns, e_tag)
    headers = {"Last-Modified": DATE, "ETag": e_tag}
    server.answer = lambda asked: Answer(data, headers=headers)
    body = Body(len(data), lambda: None)
    with pytest.raises(BadDataError, match="not those of its ETag"):
        await origin.read_body("f", meta, 0, len(data), body)
    assert body.take() == b""
