"""Bodies of objects that are not what they should be cost an error, not the daemon."""

import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest
import trio

from cachefs.errors import BadDataError, ObjectChangedError, OriginError
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


CONTENT = bytes(range(256)) * (LARGE.size_bytes // 256)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_gateway_that_ignores_ranges(
    server: ToldS3, origin: Origin, expect_log: Callable[[str], None], is_chunked: bool
) -> None:
    expect_log("ignores Range")

    def whole(asked: Asked) -> Answer:
        pieces = (CONTENT[at : at + 70_000] for at in range(0, len(CONTENT), 70_000))
        return Answer(pieces if is_chunked else CONTENT, headers=HEADERS)

    server.answer = whole
    for offset, length in [(0, MIB), (MIB + 3, MIB), (2 * MIB, MIB), (7, 100), (0, 3 * MIB)]:
        got = await origin.read("f", LARGE, offset, length)
        assert bytes(got) == CONTENT[offset : offset + length]


async def test_a_body_that_ends_with_the_connection(server: ToldS3, origin: Origin) -> None:
    """As from servers and proxies that speak HTTP/1.0."""
    cut = False

    def ranges(asked: Asked) -> Answer:
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        headers = ranged(asked) | {"Transfer-Encoding": "identity"}
        length = last + 1 - first - cut
        return Answer(CONTENT[first : last + 1], 206, headers, breaks_after_bytes=length)

    server.answer = ranges
    for offset, length in [(0, MIB), (7, 100)]:
        got = await origin.read("f", LARGE, offset, length)
        assert bytes(got) == CONTENT[offset : offset + length]
    cut = True
    with pytest.raises(BadDataError, match="99 bytes instead of 100"):
        await origin.read("f", LARGE, 7, 100)


@pytest.mark.parametrize("status", [100, 103])
async def test_interim_answers_are_passed_over(server: ToldS3, origin: Origin, status: int) -> None:
    final = (
        f'HTTP/1.1 200 OK\r\nETag: "one"\r\nLast-Modified: {DATE}\r\nContent-Length: 4\r\n\r\ndata'
    )
    server.answer = lambda asked: Answer(final.encode(), status)
    got = await origin.read("f", replace(LARGE, size_bytes=4), 0, 4)
    assert bytes(got) == b"data"


async def test_large_objects_need_ranges(server: ToldS3, origin: Origin) -> None:
    huge = replace(LARGE, size_bytes=100 * MIB)
    server.answer = lambda asked: Answer(endless(), headers=HEADERS, length=huge.size_bytes)
    with pytest.raises(OriginError, match="ignores Range"):
        await origin.read("f", huge, 99 * MIB, MIB)
    assert server.sent_bytes < 50 * MIB


def gzip_store(asked: Asked) -> Answer:
    """Unpacks on the way what is stored packed, as Google Cloud Storage."""
    told = HEADERS | {
        "x-goog-stored-content-encoding": "gzip",
        "x-goog-stored-content-length": str(len(PACKED)),
    }
    if asked.method == "HEAD":
        return Answer(headers=told)
    if "gzip" in asked.headers.get("accept-encoding", ""):
        first, end = 0, len(PACKED)
        if "range" in asked.headers:
            first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
            end = min(last + 1, end)
            told |= {"Content-Range": f"bytes {first}-{end - 1}/{len(PACKED)}"}
        status = 206 if "range" in asked.headers else 200
        return Answer(PACKED[first:end], status, told | {"Content-Encoding": "gzip"})
    return Answer(iter([TEXT]) if len(TEXT) % 2 else TEXT, headers=told)


TEXT = b"some words " * 1000
PACKED = gzip.compress(TEXT, mtime=0)


async def test_an_object_that_is_unpacked_on_the_way_is_read_as_it_is_stored(
    server: ToldS3, origin: Origin
) -> None:
    server.answer = gzip_store
    meta, data = await origin.stat_and_read("f")
    assert meta is not None
    assert (meta.size_bytes, data) == (len(PACKED), None)
    assert bytes(await origin.read("f", meta, 0, len(PACKED))) == PACKED
    asked = len(server.asked)
    assert bytes(await origin.read("f", meta, 10, 20)) == PACKED[10:30]
    assert len(server.asked) <= asked + 2  # it has learned how to ask


async def test_objects_that_are_packed_on_the_way(server: ToldS3, origin: Origin) -> None:
    """By a gateway, once another object made the client say that it accepts gzip."""

    def answer(asked: Asked) -> Answer:
        if asked.path.endswith("packed"):
            return gzip_store(asked)
        if "gzip" in asked.headers.get("accept-encoding", ""):
            return Answer(PACKED, headers=HEADERS | {"Content-Encoding": "gzip"})
        return Answer(TEXT, headers=HEADERS)

    server.answer = answer
    for _ in range(2):
        packed, plain = await origin.stat("packed"), await origin.stat("plain")
        assert packed is not None
        assert plain is not None
        assert bytes(await origin.read("packed", packed, 0, len(PACKED))) == PACKED
        assert bytes(await origin.read("plain", plain, 0, len(TEXT))) == TEXT


@pytest.mark.parametrize("size", [0, 5])
async def test_a_look_up_without_a_length(server: ToldS3, origin: Origin, size: int) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD" or "range" not in asked.headers:
            return Answer(iter([b"12345"[:size]]), headers=HEADERS)
        if not size:
            return Answer(status=416)
        return Answer(b"1", 206, HEADERS | {"Content-Range": f"bytes 0-0/{size}"})

    server.answer = answer
    assert (await origin.stat_unlisted("f")).size_bytes == size


async def test_a_store_whose_answers_lack_a_length_is_asked_once(
    server: ToldS3, origin: Origin
) -> None:
    """Not twice for each object: `begin_read` takes only what it expects."""
    server.answer = lambda asked: Answer(iter([b"data"]), headers=HEADERS)
    meta = ObjectMeta(4, LARGE.mtime_ns, LARGE.version)
    begun = 0
    while begun < 20:
        ended = trio.Event()
        if not origin.begin_read("f", meta, lambda data, ended=ended: ended.set()):  # type: ignore[misc]
            break
        await ended.wait()
        begun += 1
    assert begun == 8
    assert await origin.read("f", meta, 0, 4) == b"data"
    assert len(server.asked) == 9
