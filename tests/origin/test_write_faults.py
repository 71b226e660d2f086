"""Writes to a store that spoils one request: refused, silent, 500, 503, the answer lost after
success, or an error inside an answer with status 200."""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from cachefs.errors import ConflictError, OriginUnavailableError
from cachefs.origin.open_origin import open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.origin.resilience.writing import ResilientWriter
from cachefs.origin.writable import ABSENT, Condition
from cachefs.types import ObjectMeta
from tests.servers.store import Fault, Store
from tests.servers.store_dials import AWS, CEPH, MINIO, OSS, SEAWEEDFS
from tests.sizes import IS_LONG

pytestmark = pytest.mark.long  # the tests of silence wait

MIB = 1 << 20
PROFILES = (AWS, CEPH, MINIO, OSS, SEAWEEDFS) if IS_LONG else (AWS,)
SILENCE = {"delay_s": 60.0, "breaks_after_bytes": -1}
SPOILT: dict[str, dict[str, Any]] = {
    "refuse": {"breaks_after_bytes": -1},
    "silence": SILENCE,
    "error": {"status": 500, "code": "InternalError"},
    "busy": {"headers": (("Retry-After", "1"),)},
    "lose": {"is_done": True, "breaks_after_bytes": -1},
    "inside": {"status": 200, "code": "InternalError"},
}
FAULTS = [name for name in SPOILT if name != "inside"]


@pytest.fixture(params=[profile.name for profile in PROFILES])
def store(request, monkeypatch) -> Iterator[Store]:
    (profile,) = (each for each in PROFILES if each.name == request.param)
    with Store(profile) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        running.make_bucket("b")
        yield running
        assert running.faults == [], "a fault that never came"


@pytest.fixture
async def origin(request, store) -> AsyncIterator[ResilientOrigin]:
    opened = open_origin(f"{store.scheme}://b")
    assert opened.writer is not None
    opened.writer.guarantees = await opened.writer.check_writable()
    # No request to a busy store is sent twice, but the tests of silence wait for a timeout.
    callspec = getattr(request.node, "callspec", None)
    is_silent = callspec is not None and callspec.params.get("fault") == "silence"
    request_s = 2 if is_silent else 60
    settings = Resilience(
        read_timeout_s=600,
        request_timeout_s=60,
        write_timeout_s=600,
        write_request_s=request_s,
        assembly_s=request_s,
    )
    yield ResilientOrigin(opened, settings)
    await opened.aclose()


@pytest.fixture
def writer(origin) -> ResilientWriter:
    assert origin.writer is not None
    return origin.writer


def spoil(store: Store, fault: str, *operations: str, **more: Any) -> Fault:
    """Spoil the next of these requests."""
    return store.fail(*operations, **SPOILT[fault], **more)


def e_tag(store: Store, key: str) -> str:
    """What the store itself has."""
    return store.buckets["b"].objects[key].e_tag


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("condition", ["none", "absent", "version"])
async def test_put(store, writer, fault, condition) -> None:
    given = None if condition == "none" else ABSENT
    if condition == "version":
        given = Condition((await writer.put("a", b"before")).version)
    spoil(store, fault, "PutObject")
    meta = await writer.put("a", b"after", given)
    assert store.read("b", "a") == b"after"
    assert meta.version == e_tag(store, "a")


async def test_a_lost_answer_and_somebody_elses_object(store, writer) -> None:
    """Our first try fails for good; another node makes an object of the same bytes."""
    spoil(store, "error", "PutObject")
    store.put("b", "lock", b"")
    with pytest.raises(ConflictError):
        await writer.put("lock", b"", ABSENT)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_part(store, writer, fault) -> None:
    data = os.urandom(6 * MIB)
    upload = await writer.start_upload("a")
    spoil(store, fault, "UploadPart")
    tags = [
        await writer.put_part(upload, 1, 0, data),
        await writer.put_part(upload, 2, 6 * MIB, b"end"),
    ]
    await writer.complete(upload, tags)
    assert store.read("b", "a") == data + b"end"
    assert store.uploads("b") == []


@pytest.mark.parametrize("fault", [*FAULTS, "inside"])
@pytest.mark.parametrize("condition", [None, ABSENT])
async def test_complete(store, writer, fault, condition) -> None:
    upload = await writer.start_upload("a")
    tags = [await writer.put_part(upload, 1, 0, b"parts")]
    spoil(store, fault, "CompleteMultipartUpload")
    meta = await writer.complete(upload, tags, condition)
    assert store.read("b", "a") == b"parts"
    assert meta.version == e_tag(store, "a")
    assert store.uploads("b") == []


@pytest.mark.parametrize("fault", ["refuse", "silence", "error", "busy"])
async def test_start_and_abort(store, writer, fault) -> None:
    spoil(store, fault, "CreateMultipartUpload")
    upload = await writer.start_upload("a")
    await writer.put_part(upload, 1, 0, b"one")
    spoil(store, fault, "ListParts")
    assert len(await writer.parts(upload)) == 1
    spoil(store, fault, "DeleteObject", "AbortMultipartUpload")
    await writer.abort(upload)
    assert store.uploads("b") == []


@pytest.mark.parametrize("fault", [*FAULTS, "inside"])
@pytest.mark.parametrize("condition", [None, ABSENT])
async def test_copy(store, writer, fault, condition) -> None:
    old = await writer.put("old", b"bytes")
    spoil(store, fault, "CopyObject")
    await writer.copy("old", old, "new", condition)
    assert store.read("b", "new") == b"bytes"
    with pytest.raises(ConflictError):
        await writer.copy("old", old, "new", ABSENT)


@pytest.mark.parametrize("fault", FAULTS)
async def test_deletions(store, writer, fault) -> None:
    meta = await writer.put("a", b"one")
    for name in ("b", "c"):
        await writer.put(name, b"two")
    spoil(store, fault, "DeleteObject", "AbortMultipartUpload")
    await writer.delete("a", Condition(meta.version))
    spoil(store, fault, "DeleteObjects")
    assert await writer.delete_many(["b", "c"]) == {}
    assert list(store.objects("b")) == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_directories(store, writer, fault) -> None:
    spoil(store, fault, "PutObject")
    await writer.make_directory("dir")
    assert list(store.objects("b")) == ["dir/"]
    spoil(store, fault, "DeleteObject", "AbortMultipartUpload")
    await writer.remove_directory("dir")
    assert list(store.objects("b")) == []


@pytest.mark.parametrize("fault", [*FAULTS, "inside"])
async def test_a_new_directory(store, writer, fault) -> None:
    """After a lost answer a try knows its own marker by its metadata."""
    if not store.dials.keeps_metadata_of_markers:
        return
    spoil(store, fault, "PutObject")
    await writer.make_directory("dir", is_new=True)
    assert list(store.objects("b")) == ["dir/"]
    with pytest.raises(ConflictError):
        await writer.make_directory("dir", is_new=True)


async def test_a_store_that_never_answers_is_given_up(store, origin) -> None:
    settings = Resilience(read_timeout_s=60, write_timeout_s=1, write_request_s=0.4)
    hurried = ResilientOrigin(origin._inner, settings)
    assert hurried.writer is not None
    store.fail(times=None, **SILENCE)
    with pytest.raises(OriginUnavailableError, match="can't be written"):
        await hurried.writer.put("a", b"data")
    store.faults.clear()


async def test_the_version_of_a_write_is_that_of_a_look_up(origin, writer) -> None:
    meta = await writer.put("a", b"data")
    found = await origin.stat("a")
    assert isinstance(found, ObjectMeta)
    assert found.version == meta.version
