"""Objects of 5 GiB, where a store can have one without 5 GiB of bytes: generated or sparse.

HDFS can't: its DataNodes hold what they report. The arithmetic of `origin/hdfs/client.py` is that
of a file of a few bytes."""

import random
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cachefs.errors import ObjectChangedError
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from tests.memory_origin import MemoryOrigin
from tests.origin.listing import list_all

GIB = 1 << 30
SIZE = 5 * GIB + 3
STRIPE = 4096
MARKS = [0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, SIZE - STRIPE]

Expected = Callable[[int, int], bytes]


def generated(offset: int, length: int) -> bytes:
    first, end = offset // STRIPE, -(-(offset + length) // STRIPE)
    data = b"".join(random.Random(index).randbytes(STRIPE) for index in range(first, end))
    return data[offset - first * STRIPE :][:length]


class LargeS3(BaseHTTPRequestHandler):
    """One bucket with one generated object, `large`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if "list-type=2" in self.path:
            self.answer(200, {}, listing() if self.command == "GET" else b"")
            return
        if not self.path.partition("?")[0].endswith("/large"):
            self.answer(404, {}, b"")
            return
        headers = {"ETag": '"e-2"', "Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.command == "HEAD" or span is None:
            self.answer(200, headers | {"Content-Length": str(SIZE)}, b"")
            return
        first, last = int(span[1]), min(int(span[2]), SIZE - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{SIZE}"
        self.answer(206, headers, generated(first, last - first + 1))

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Silence."""


def listing() -> bytes:
    return (
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>large</Name>'
        "<Prefix></Prefix><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>"
        "<IsTruncated>false</IsTruncated><Contents><Key>large</Key>"
        f"<Size>{SIZE}</Size><ETag>&quot;e-2&quot;</ETag>"
        "<LastModified>2026-11-02T10:00:00.000Z</LastModified></Contents></ListBucketResult>"
    ).encode()


@pytest.fixture
def server(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), LargeS3)
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for store in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(store, "x")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "x")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["memory", "file", "s3", "s3fs", "oss"])
async def large(request, tmp_path):
    """An origin with the file `large`, and what its bytes are around `MARKS`."""
    if request.param == "memory":
        memory = MemoryOrigin()
        memory.put_generated("large", SIZE)
        yield memory, lambda offset, length: memory.expected("large", offset, length)
        return
    if request.param == "file":
        with (tmp_path / "large").open("wb") as sparse:
            for mark in MARKS:
                sparse.seek(max(0, mark - STRIPE))
                sparse.write(generated(max(0, mark - STRIPE), min(2 * STRIPE, SIZE - mark)))
            sparse.truncate(SIZE)
            sparse.seek(SIZE - STRIPE)
            sparse.write(generated(SIZE - STRIPE, STRIPE))
        origin = open_origin(f"file://{tmp_path}")
    else:
        port = request.getfixturevalue("server").server_port
        host = "localhost" if request.param == "oss" else "127.0.0.1"
        url = {"s3": "s3://bucket", "s3fs": "fsspec+s3://bucket", "oss": "oss://bucket"}
        origin = open_origin(url[request.param], OriginOptions(f"http://{host}:{port}"))
    yield origin, generated
    await origin.aclose()


async def test_ranges_beyond_4_gib(large: tuple[Origin, Expected]) -> None:
    origin, expected = large
    meta = await origin.stat("large")
    assert meta is not None
    assert meta.size_bytes == SIZE
    assert (await list_all(origin))["large"].meta == meta
    for mark in MARKS:
        got = await origin.read("large", meta, mark, 3)
        assert bytes(got) == expected(mark, 3), mark
    across = (1 << 32) - 1000
    assert bytes(await origin.read("large", meta, across, 2000)) == expected(across, 2000)
    assert bytes(await origin.read("large", meta, SIZE - 1, 1)) == expected(SIZE - 1, 1)
    other = type(meta)(SIZE, meta.mtime_ns, "another")
    with pytest.raises(ObjectChangedError):
        await origin.read("large", other, 1 << 32, 10)
