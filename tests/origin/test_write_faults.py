"""Writes to a real server behind a proxy that spoils one request: refused, silent, 500, 503, the
answer lost after success, or an error inside an answer with status 200."""

import os
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from cachefs.errors import ConflictError, OriginUnavailableError
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.origin.resilience.writing import ResilientWriter
from cachefs.origin.writable import ABSENT, Condition, Guarantees
from cachefs.types import ObjectMeta
from tests.servers.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.server

MIB = 1 << 20
FAULTS = [Fault.REFUSE, Fault.SILENCE, Fault.ERROR, Fault.BUSY, Fault.LOSE]
_buckets = count(1)


@pytest.fixture(scope="module")
def proxy(seaweedfs):
    with FaultProxy(seaweedfs.endpoint) as running:
        yield running


@pytest.fixture
def bucket(seaweedfs) -> str:
    return seaweedfs.make_bucket(f"write-faults-{next(_buckets)}")


@pytest.fixture
async def origin(request, seaweedfs, proxy, bucket, monkeypatch) -> AsyncIterator[ResilientOrigin]:
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    opened = open_origin(f"s3://{bucket}", OriginOptions(endpoint=proxy.endpoint))
    # No request to a busy server is sent twice, but the tests of silence wait for a timeout.
    callspec = getattr(request.node, "callspec", None)
    is_silent = callspec is not None and callspec.params.get("fault") is Fault.SILENCE
    request_s = 6 if is_silent else 60
    settings = Resilience(
        read_timeout_s=600,
        request_timeout_s=60,
        write_timeout_s=600,
        write_request_s=request_s,
        assembly_s=request_s,
    )
    yield ResilientOrigin(opened, settings)
    proxy.clear()
    await opened.aclose()


@pytest.fixture
def writer(origin) -> ResilientWriter:
    assert origin.writer is not None
    return origin.writer


def content(seaweedfs: Any, bucket: str, key: str) -> bytes:
    """What the server itself has."""
    data: bytes = seaweedfs.client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return data


def keys(seaweedfs: Any, bucket: str) -> list[str]:
    return [o["Key"] for o in seaweedfs.client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def uploads(seaweedfs: Any, bucket: str) -> list[str]:
    found = seaweedfs.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return [upload["UploadId"] for upload in found]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("condition", ["none", "absent", "version"])
async def test_put(seaweedfs, proxy, bucket, writer, fault, condition) -> None:
    given = None if condition == "none" else ABSENT
    if condition == "version":
        given = Condition((await writer.put("a", b"before")).version)
    proxy.fault(fault, times=1, method="PUT")
    meta = await writer.put("a", b"after", given)
    assert proxy.counts().faults
    assert content(seaweedfs, bucket, "a") == b"after"
    assert meta.version == seaweedfs.client.head_object(Bucket=bucket, Key="a")["ETag"]


async def test_a_lost_answer_and_somebody_elses_object(proxy, writer, seaweedfs, bucket) -> None:
    """Our first try fails for good; another node makes an object of the same bytes."""
    proxy.fault(Fault.ERROR, times=1, method="PUT")
    seaweedfs.put(bucket, "lock", b"")
    with pytest.raises(ConflictError):
        await writer.put("lock", b"", ABSENT)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_part(seaweedfs, proxy, bucket, writer, fault) -> None:
    data = os.urandom(6 * MIB)
    upload = await writer.start_upload("a")
    proxy.fault(fault, times=1, method="PUT", text="partNumber=")
    tags = [
        await writer.put_part(upload, 1, 0, data),
        await writer.put_part(upload, 2, 6 * MIB, b"end"),
    ]
    await writer.complete(upload, tags)
    assert content(seaweedfs, bucket, "a") == data + b"end"
    assert uploads(seaweedfs, bucket) == []


@pytest.mark.parametrize("fault", [*FAULTS, Fault.INSIDE])
@pytest.mark.parametrize("condition", [None, ABSENT])
async def test_complete(seaweedfs, proxy, bucket, writer, fault, condition) -> None:
    upload = await writer.start_upload("a")
    tags = [await writer.put_part(upload, 1, 0, b"parts")]
    proxy.fault(fault, times=1, method="POST", text="uploadId=")
    meta = await writer.complete(upload, tags, condition)
    assert proxy.counts().faults
    assert content(seaweedfs, bucket, "a") == b"parts"
    assert meta.version == seaweedfs.client.head_object(Bucket=bucket, Key="a")["ETag"]
    assert uploads(seaweedfs, bucket) == []


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.SILENCE, Fault.ERROR, Fault.BUSY])
async def test_start_and_abort(seaweedfs, proxy, bucket, writer, fault) -> None:
    proxy.fault(fault, times=1, method="POST", text="uploads=")
    upload = await writer.start_upload("a")
    await writer.put_part(upload, 1, 0, b"one")
    proxy.fault(fault, times=1, text="part-number-marker=")
    assert len(await writer.parts(upload)) == 1
    proxy.fault(fault, times=1, method="DELETE")
    await writer.abort(upload)
    assert uploads(seaweedfs, bucket) == []


@pytest.mark.parametrize("fault", [*FAULTS, Fault.INSIDE])
@pytest.mark.parametrize("condition", [None, ABSENT])
async def test_copy(seaweedfs, proxy, bucket, writer, fault, condition) -> None:
    old = await writer.put("old", b"bytes")
    proxy.fault(fault, times=1, method="PUT", text="new")
    await writer.copy("old", old, "new", condition)
    assert content(seaweedfs, bucket, "new") == b"bytes"
    with pytest.raises(ConflictError):
        await writer.copy("old", old, "new", ABSENT)


@pytest.mark.parametrize("fault", FAULTS)
async def test_deletions(seaweedfs, proxy, bucket, writer, fault) -> None:
    meta = await writer.put("a", b"one")
    for name in ("b", "c"):
        await writer.put(name, b"two")
    proxy.fault(fault, times=1, method="DELETE")
    await writer.delete("a", Condition(meta.version))
    proxy.fault(fault, times=1, method="POST", text="delete=")
    assert await writer.delete_many(["b", "c"]) == {}
    assert keys(seaweedfs, bucket) == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_directories(seaweedfs, proxy, bucket, writer, fault) -> None:
    proxy.fault(fault, times=1, method="PUT")
    await writer.make_directory("dir")
    assert keys(seaweedfs, bucket) == ["dir/"]
    proxy.fault(fault, times=1, method="DELETE")
    await writer.remove_directory("dir")
    assert keys(seaweedfs, bucket) == []


@pytest.mark.parametrize("fault", [*FAULTS, Fault.INSIDE])
async def test_a_new_directory(moto_s3, monkeypatch, fault) -> None:
    """The server keeps the metadata of markers: after a lost answer a try knows its own marker."""
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = moto_s3.make_bucket(f"write-faults-{next(_buckets)}")
    with FaultProxy(moto_s3.endpoint) as proxy:
        opened = open_origin(f"s3://{bucket}", OriginOptions(endpoint=proxy.endpoint))
        assert opened.writer is not None
        opened.writer.guarantees = Guarantees()
        settings = Resilience(read_timeout_s=600, write_timeout_s=600, write_request_s=6)
        writer = ResilientOrigin(opened, settings).writer
        assert writer is not None
        proxy.fault(fault, times=1, method="PUT")
        await writer.make_directory("dir", is_new=True)
        assert proxy.counts().faults
        assert keys(moto_s3, bucket) == ["dir/"]
        with pytest.raises(ConflictError):
            await writer.make_directory("dir", is_new=True)
        await opened.aclose()


async def test_a_store_that_never_answers_is_given_up(proxy, origin, bucket) -> None:
    settings = Resilience(read_timeout_s=60, write_timeout_s=1, write_request_s=0.4)
    hurried = ResilientOrigin(origin._inner, settings)
    assert hurried.writer is not None
    proxy.fault(Fault.SILENCE)
    with pytest.raises(OriginUnavailableError, match="can't be written"):
        await hurried.writer.put("a", b"data")


async def test_the_version_of_a_write_is_that_of_a_look_up(origin, writer) -> None:
    meta = await writer.put("a", b"data")
    found = await origin.stat("a")
    assert isinstance(found, ObjectMeta)
    assert found.version == meta.version
