"""Objects of 5 GiB, where a store can have one without 5 GiB of bytes: generated or sparse.

HDFS can't: its DataNodes hold what they report. The arithmetic of `origin/hdfs/client.py` is that
of a file of a few bytes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cachefs.errors import ObjectChangedError
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from tests.memory_origin import MemoryOrigin
from tests.origin.listing import list_all
from tests.servers.store import Store
from tests.servers.store_dials import AWS

GIB = 1 << 30
SIZE = 5 * GIB + 3
STRIPE = 4096
MARKS = [0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, SIZE - STRIPE]

Expected = Callable[[int, int], bytes]


def generated(offset: int, length: int) -> bytes:
    first, end = offset // STRIPE, -(-(offset + length) // STRIPE)
    data = b"".join(random.Random(index).randbytes(STRIPE) for index in range(first, end))
    return data[offset - first * STRIPE :][:length]


class Generated:
    """The bytes of an object that is nowhere."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, part: slice) -> bytes:
        return generated(part.start, part.stop - part.start)


@pytest.fixture
def store(monkeypatch) -> Iterator[Store]:
    """A store with the object `large`, which is its own proxy."""
    with Store(replace(AWS, other_regions=None)) as running:
        running.make_bucket("bucket")
        running.put("bucket", "large", Generated(), e_tag='"e-2"')
        for variable, value in running.environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("OSS_ACCESS_KEY_ID", running.access_key)
        monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", running.secret_key)
        monkeypatch.setenv("http_proxy", running.endpoint)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield running


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
        port = request.getfixturevalue("store").endpoint.rpartition(":")[2]
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
