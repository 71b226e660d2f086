"""Requests that some stores lack: deletion of many objects, and copies. The slower request that
they have takes their place."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest

from cachefs.errors import AccessDeniedError, OriginError
from cachefs.origin.open_origin import open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.origin.resilience.writing import ResilientWriter
from cachefs.origin.writable import ABSENT, UNCHECKED, Guarantees
from cachefs.types import ObjectMeta
from tests.servers.told_s3 import Answer, Asked, ToldS3

REFUSALS = [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "MalformedPOSTRequest")]
MIB = 1 << 20
REFUSED = 6


class Store:
    """Objects in memory. `refuses` says which requests it lacks."""

    def __init__(self, refuses: Callable[[Asked], Answer | None]) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.parts: dict[str, bytes] = {}
        self.metadata: dict[str, str] = {}
        self._refuses = refuses

    def __call__(self, asked: Asked) -> Answer:
        refused = self._refuses(asked)
        if refused is not None:
            return refused
        match asked.method:
            case "DELETE":
                if "uploadId" not in asked.query:
                    self.objects.pop(asked.path, None)
                return Answer(b"", 204)
            case "POST":
                return self._post(asked)
            case "PUT" if "x-amz-copy-source" in asked.headers:
                self.objects[asked.path] = self.objects[asked.headers["x-amz-copy-source"]]
                return Answer(b"<R><ETag>copied</ETag></R>")
            case "PUT":
                e_tag = f'"{hashlib.md5(asked.body).hexdigest()}"'
                if "uploadId" in asked.query:
                    self.parts[asked.query["partNumber"]] = asked.body
                else:
                    self.objects[asked.path] = (asked.body, kept(asked))
                return Answer(b"", headers={"ETag": e_tag})
            case _:
                return self._get(asked)

    def _post(self, asked: Asked) -> Answer:
        if "uploads" in asked.query:
            self.metadata = kept(asked)
            return Answer(b"<R><UploadId>u</UploadId></R>")
        body = b"".join(self.parts[number] for number in sorted(self.parts, key=int))
        self.objects[asked.path] = (body, self.metadata)
        return Answer(b"<R><ETag>joined-1</ETag></R>")

    def _get(self, asked: Asked) -> Answer:
        if asked.path not in self.objects:
            return error(404, "NoSuchKey")
        body, metadata = self.objects[asked.path]
        headers = metadata | {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if asked.method == "HEAD":
            return Answer(b"", 200, headers, len(body))
        if "range" not in asked.headers:
            return Answer(body, 200, headers)
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        return Answer(body[first : last + 1], 206, headers)


def kept(asked: Asked) -> dict[str, str]:
    names = ("content-type", "cache-control")
    return {n: v for n, v in asked.headers.items() if n in names or n.startswith("x-amz-meta-")}


def error(status: int, code: str) -> Answer:
    return Answer(f"<Error><Code>{code}</Code></Error>".encode(), status)


@asynccontextmanager
async def opened(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> AsyncIterator[tuple[ToldS3, ResilientWriter]]:
    with ToldS3(store) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        inner = open_origin("s3://bucket")
        writer = ResilientOrigin(inner, Resilience(write_timeout_s=60)).writer
        assert writer is not None
        writer.guarantees = Guarantees()
        yield server, writer
        await inner.aclose()


def fill(store: Store, count: int) -> list[str]:
    paths = [f"old/{number}" for number in range(count)]
    store.objects = {f"/bucket/{path}": (b"x", {}) for path in paths}
    return paths


def deletions(server: ToldS3) -> list[str]:
    """The methods of requests that delete."""
    return [a.method for a in server.asked if a.method == "DELETE" or "delete" in a.query]


@pytest.mark.parametrize(
    "answer",
    [
        *(error(*refusal) for refusal in REFUSALS),
        error(403, "AccessDenied"),
        Answer(b"<html>no such page</html>"),
        Answer(b""),
    ],
)
async def test_without_delete_objects_each_is_deleted_alone(monkeypatch, answer: Answer) -> None:
    store = Store(lambda asked: answer if "delete" in asked.query else None)
    async with opened(monkeypatch, store) as (server, writer):
        assert await writer.delete_many(fill(store, 40)) == {}
        assert store.objects == {}
        assert deletions(server) == ["POST"] + ["DELETE"] * 40
        await writer.delete_many(["one", "two"])  # what was found out is remembered
        assert deletions(server)[41:] == ["DELETE"] * 2


@pytest.mark.parametrize("key", ["<Key>old/other</Key>", ""])
async def test_no_key_is_deleted_that_was_not_asked_for(monkeypatch, key: str) -> None:
    """A store may write keys in another way when it says what it has not deleted."""
    said = f"<DeleteResult><Error>{key}<Code>InternalError</Code></Error></DeleteResult>"

    def refuses(asked: Asked) -> Answer | None:
        return Answer(said.encode()) if "delete" in asked.query else None

    store = Store(refuses)
    async with opened(monkeypatch, store) as (_, writer):
        paths = fill(store, REFUSED)
        store.objects["/bucket/old/other"] = (b"x", {})
        assert await writer.delete_many(paths) == {}
        assert list(store.objects) == ["/bucket/old/other"]


async def test_what_can_not_be_deleted_alone_is_named(monkeypatch) -> None:
    def refuses(asked: Asked) -> Answer | None:
        if "delete" in asked.query:
            return error(501, "NotImplemented")
        is_kept = asked.method == "DELETE" and asked.path.endswith("/7")
        return error(403, "AccessDenied") if is_kept else None

    store = Store(refuses)
    async with opened(monkeypatch, store) as (_, writer):
        failed = await writer.delete_many(fill(store, 40))
    assert list(failed) == ["old/7"]
    assert isinstance(failed["old/7"], AccessDeniedError)
    assert list(store.objects) == ["/bucket/old/7"]


@pytest.mark.parametrize(
    ("refusal", "size_bytes"),
    [
        *((refusal, 100) for refusal in [*REFUSALS, (403, "AccessDenied")]),
        ((501, "NotImplemented"), 0),
        ((501, "NotImplemented"), 17 * MIB),
    ],
)
async def test_without_copies_the_bytes_are_read_and_written(
    monkeypatch, refusal: tuple[int, str], size_bytes: int
) -> None:
    store = Store(lambda a: error(*refusal) if "x-amz-copy-source" in a.headers else None)
    body = bytes(range(256)) * (size_bytes // 256 + 1)
    body = body[:size_bytes]
    more = {"content-type": "image/png", "x-amz-meta-colour": "red"}
    store.objects["/bucket/a"] = (body, more)
    meta = ObjectMeta(size_bytes, 0, f'"{hashlib.md5(body).hexdigest()}"')
    async with opened(monkeypatch, store) as (server, writer):
        for name in ("b", "c"):
            found = await writer.copy("a", meta, name, ABSENT)
            assert found.size_bytes == size_bytes
            copy, metadata = store.objects[f"/bucket/{name}"]
            assert copy == body
            assert more.items() <= metadata.items()
        asked = [a for a in server.asked if "x-amz-copy-source" in a.headers]
        assert len(asked) == (1 if refusal[0] in (501, 405) else 2)


async def test_a_copy_that_fails_by_hand_leaves_no_upload(monkeypatch) -> None:
    aborted = []

    def refuses(asked: Asked) -> Answer | None:
        if asked.method == "DELETE":
            aborted.append(asked.query["uploadId"])
        if asked.query.get("partNumber") == "2":
            return error(400, "EntityTooLarge")
        return error(501, "NotImplemented") if "x-amz-copy-source" in asked.headers else None

    store = Store(refuses)
    body = bytes(20 * MIB)
    store.objects["/bucket/a"] = (body, {})
    meta = ObjectMeta(len(body), 0, f'"{hashlib.md5(body).hexdigest()}"')
    async with opened(monkeypatch, store) as (_, writer):
        with pytest.raises(OriginError, match="EntityTooLarge"):
            await writer.copy("a", meta, "b")
    assert aborted == ["u"]
    assert "/bucket/b" not in store.objects


async def test_a_check_of_a_busy_store_repeats_single_requests(monkeypatch) -> None:
    async def requests(every: int) -> int:
        asked_for = count(1)

        def refuses(_: Asked) -> Answer | None:
            return None if next(asked_for) % every else error(503, "SlowDown")

        store = Store(refuses)
        async with opened(monkeypatch, store) as (server, writer):
            await writer.check_writable("dir")
            assert store.objects == {}
            starts = sum("uploads" in a.query for a in server.asked)
            assert starts <= 3
            return len(server.asked)

    assert await requests(10) < 1.5 * await requests(1000)


@pytest.mark.parametrize("code", ["ExpiredToken", "RequestExpired", "InvalidToken"])
async def test_a_write_waits_for_new_credentials(monkeypatch, code: str) -> None:
    """The answer to a HEAD can't say why it is refused."""
    left = [0]

    def refuses(asked: Asked) -> Answer | None:
        if not left[0] or (left[0] == REFUSED and asked.method == "HEAD"):
            return None
        left[0] -= 1
        return Answer(b"", 400) if asked.method == "HEAD" else error(400, code)

    store = Store(refuses)
    async with opened(monkeypatch, store) as (_, writer):
        await writer.put("b", b"before")
        writer.guarantees = UNCHECKED  # each try asks first what is there
        left[0] = REFUSED
        await writer.put("a", b"one", ABSENT)
        assert store.objects["/bucket/a"][0] == b"one"
        assert not left[0]
