"""A refusal of one object is an answer, and says why. Other objects stay readable."""

import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    NotFoundError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
)
from cachefs.origin.fsspec import local_tree
from cachefs.origin.fsspec.errors import from_os
from cachefs.origin.hdfs.errors import from_hdfs_native
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import ObjectMeta
from tests.origin.listing import list_all
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

HEADERS = {"Last-Modified": DATE, "ETag": '"one"'}
SMALL = ObjectMeta(4, 1_793_613_600_000_000_000, '"one"')
LARGE = ObjectMeta(3 << 20, 1_793_613_600_000_000_000, '"one"')
WAYS = ["look up", "stat", "small", "large"]


class Store:
    """Every object can be read but `bad`."""

    def __init__(self) -> None:
        self.status, self.body = 400, b""
        self.head_status: int | None = None

    def answer(self, asked: Asked) -> Answer:
        if asked.is_list:
            return page(row("bad"), row("good"))
        if not asked.path.endswith("/bad"):
            return Answer(b"data", headers=HEADERS)
        if asked.method == "HEAD" and self.head_status:
            return Answer(b"data", self.head_status, HEADERS)
        return Answer(self.body, self.status)

    def says(self, status: int, code: str, message: str = "", more: str = "") -> None:
        self.status = status
        inner = f"<Code>{code}</Code><Message>{message}</Message>{more}"
        self.body = f"<?xml version='1.0'?><Error>{inner}</Error>".encode()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ToldS3(store.answer) as told:
        for name, value in told.environment.items():
            monkeypatch.setenv(name, value)
        yield told


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[ResilientOrigin]:
    opened = ResilientOrigin(open_origin("s3://b", OriginOptions()), Resilience())
    yield opened
    await opened.aclose()


async def failure(origin: ResilientOrigin, way: str = "small", path: str = "bad") -> OriginError:
    meta = LARGE if way == "large" else SMALL
    ask = {"look up": origin.stat_and_read, "stat": origin.stat}.get(
        way, lambda path: origin.read(path, meta, 0, meta.size_bytes)
    )
    with pytest.raises(OriginError) as caught:
        await ask(path)
    assert str(caught.value).isprintable()
    return caught.value


@pytest.mark.parametrize("status", [400, 402, 405, 409, 410, 411, 422, 451, 501])
@pytest.mark.parametrize("way", WAYS)
async def test_a_definite_answer_is_not_asked_for_again(
    store: Store, server: ToldS3, origin: ResilientOrigin, way: str, status: int
) -> None:
    store.says(status, "InvalidRequest", "no")
    error = await failure(origin, way)
    assert type(error) is RefusedError
    assert len(server.asked) <= 2, "a look-up may add a HEAD"
    assert origin.state()["failed_calls"] == origin.state()["retries"] == 0
    assert bytes(await origin.read("good", SMALL, 0, 4)) == b"data"


@pytest.mark.parametrize(("status", "code"), [(408, ""), (400, "RequestTimeout"), (500, "")])
async def test_other_answers_are_asked_for_again(
    store: Store, server: ToldS3, origin: ResilientOrigin, status: int, code: str
) -> None:
    def answer(asked: Asked) -> Answer:
        return store.answer(asked) if len(server.asked) < 3 else Answer(b"data", headers=HEADERS)

    store.says(status, code or "X")
    server.answer = answer
    assert bytes(await origin.read("bad", SMALL, 0, 4)) == b"data"


@pytest.mark.parametrize("status", [400, 403, 405, 413, 501])
async def test_a_key_that_can_not_be_written(
    store: Store, server: ToldS3, origin: ResilientOrigin, status: int
) -> None:
    store.says(status, "No", "not this key")
    assert origin.writer is not None
    with pytest.raises(OriginError) as caught:
        await origin.writer.put("bad", b"data")
    assert not isinstance(caught.value, OriginUnavailableError)
    assert len(server.asked) == 1
    assert bytes(await origin.read("good", SMALL, 0, 4)) == b"data"


@pytest.mark.parametrize(
    ("status", "code", "message", "more", "kind", "says"),
    [
        (403, "InvalidObjectState", "x", "<StorageClass>DEEP_ARCHIVE</StorageClass>", RefusedError,
         r"archived \(DEEP_ARCHIVE\): restore it"),
        (403, "InvalidObjectState", "not valid for the object's storage class", "", RefusedError,
         "archived: restore it .*not valid for the object's storage class"),
        (400, "KMS.DisabledException", "key is disabled", "", RefusedError,
         "encryption key can't be used .HTTP 400 KMS.DisabledException: key is disabled"),
        (403, "AccessDenied", "x may not perform: kms:Decrypt", "", AccessDeniedError,
         "allow kms:Decrypt$"),
        (403, "AccessDenied", "", "", AccessDeniedError, "s3:GetObject.*kms:.*readers pay"),
        (403, "InvalidAccessKeyId", "no such key", "", AccessDeniedError, "no such.*credentials"),
        (400, "InvalidRequest", "The object was stored using a form of Server Side Encryption.", "",
         RefusedError, "Server Side Encryption.*SSE-C"),
        (400, "AuthorizationHeaderMalformed", "x", "<Region>eu-west-3</Region>", RefusedError,
         "region eu-west-3: set it"),
        (301, "PermanentRedirect", "x", "<Endpoint>s3.eu-west-3.amazonaws.com</Endpoint>",
         RefusedError, "s3.eu-west-3.amazonaws.com"),
        (407, "X", "", "", OriginUnavailableError, "the proxy .*user and the password"),
    ],
)  # fmt: skip
async def test_the_message_names_the_cause(
    store: Store,
    server: ToldS3,
    status: int,
    code: str,
    message: str,
    more: str,
    kind: type[OriginError],
    says: str,
) -> None:
    store.says(status, code, message, more)
    origin = open_origin("s3://b", OriginOptions())
    with pytest.raises(kind, match=says):
        await origin.read("bad", SMALL, 0, 4)
    await origin.aclose()


async def test_an_archived_object_has_attributes(store: Store, origin: ResilientOrigin) -> None:
    store.says(403, "InvalidObjectState")
    store.head_status = 200
    found, data = await origin.stat_and_read("bad")
    assert found is not None
    assert data is None
    error = await failure(origin)
    assert "restore" in str(error)
    assert "credentials" not in str(error)


@pytest.mark.parametrize("way", ["stat", "look up"])
async def test_a_head_without_a_body(store: Store, origin: ResilientOrigin, way: str) -> None:
    assert "SSE-C" in str(await failure(origin, way))


async def test_what_the_store_says_is_bounded(store: Store, origin: ResilientOrigin) -> None:
    token = "FwoGZXIvYXdzEJr" * 20
    store.says(405, "No", f"\x1b[31m&#x1b;[2J {token} &lt;b&gt; " + "long " * 1000)
    text = str(await failure(origin))
    assert token[:60] not in text
    assert "<b>" in text
    assert len(text) < 500


@pytest.mark.parametrize("status", [400, 403, 500])
async def test_a_refused_listing_is_named(
    status: int, server: ToldS3, origin: ResilientOrigin
) -> None:
    server.answer = lambda asked: Answer(b"<Error><Code>Odd</Code></Error>", status)
    with pytest.raises(OriginError, match=r"s3://[a-z]+/bad/ ") as caught:
        await list_all(origin, "bad")
    assert ("s3:ListBucket" in str(caught.value)) == (status == 403)


async def test_a_web_page_instead_of_a_listing(server: ToldS3) -> None:
    html = {"Content-Type": "text/html"}
    server.answer = lambda asked: Answer(b"<!DOCTYPE html><title>Console</title>", headers=html)
    origin = open_origin("s3://b", OriginOptions())
    with pytest.raises(BadDataError, match=r"web page.*console"):
        await origin.check()
    await origin.aclose()


async def test_a_host_that_does_not_resolve(server: ToldS3) -> None:
    origin = open_origin("s3://b", OriginOptions(endpoint="http://no-such-host.invalid:9000"))
    with pytest.raises(OriginUnavailableError, match=r"no-such-host\.invalid.*DNS"):
        await origin.check()
    with pytest.raises(OriginUnavailableError, match=r"no-such-host\.invalid.*DNS"):
        await origin.read("f", SMALL, 0, 4)
    await origin.aclose()


# Web servers


@pytest.mark.expect_log("is not shown: the server says HTTP")
@pytest.mark.parametrize("status", [400, 405, 451, 501])
async def test_a_web_server_refuses_one_file(server: ToldS3, status: int) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.path.endswith("/"):
            links = b'<a href="bad">b</a><a href="good">g</a>'
            return Answer(links, headers={"Content-Type": "text/html"})
        if asked.path.endswith("bad"):
            return Answer(status=status)
        return Answer(b"data", headers=HEADERS)

    server.answer = answer
    plain = open_origin(f"{server.endpoint}/d", OriginOptions())
    origin = ResilientOrigin(plain, Resilience())
    assert list(await list_all(origin)) == ["good"]
    error = await failure(origin)
    assert type(error) is RefusedError
    assert f"HTTP {status}" in str(error)
    assert origin.state()["retries"] == 0
    await origin.aclose()


@pytest.mark.expect_log("/d/(bad|worse|page)' is not shown: ")
async def test_a_web_server_fails_for_a_few_files(server: ToldS3) -> None:
    """Two fail each time, and one is no file. Others are shown, and the source is no worse."""
    names = ["bad", "worse", "page", *(f"good{number}" for number in range(3))]
    fails = {"bad", "worse"}

    def answer(asked: Asked) -> Answer:
        if asked.path.endswith("/"):
            links = "".join(f'<a href="{name}">x</a>' for name in names)
            return Answer(links.encode(), headers={"Content-Type": "text/html"})
        name = asked.path.rpartition("/")[2]
        if name in fails:
            return Answer(status=500, breaks_after_bytes=-1 if name == "worse" else None)
        return Answer(b"data", headers={} if name == "page" else HEADERS)

    server.answer = answer
    plain = open_origin(f"{server.endpoint}/d", OriginOptions())
    await plain.check()
    assert [asked.path for asked in server.asked] == ["/d/"], "it needs no file"
    assert list(await list_all(plain)) == ["good0", "good1", "good2"]
    fails.update(names)
    with pytest.raises(OriginUnavailableError):
        await list_all(plain)
    await plain.aclose()


async def test_what_is_gone_is_absent(server: ToldS3) -> None:
    server.answer = lambda asked: Answer(status=410)
    origin = open_origin(f"{server.endpoint}/d", OriginOptions())
    with pytest.raises(NotFoundError):
        await origin.read("bad", SMALL, 0, 4)
    await origin.aclose()


# Local files


@pytest.mark.expect_log("/broken' is not shown: ")
@pytest.mark.expect_log("/dead' is shown, but can't be read: ")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.ESTALE])
async def test_a_name_that_can_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for name in ("f1", "f2", "broken"):
        (tmp_path / name).write_text(name)
    (tmp_path / "dead").mkdir()
    described = local_tree.ConfinedFileSystem.described_as

    def break_some(self, name, *more):  # type: ignore[no-untyped-def]
        if Path(name).name in ("dead", "broken"):
            raise OSError(number, os.strerror(number))
        return described(self, name, *more)

    monkeypatch.setattr(local_tree.ConfinedFileSystem, "described_as", break_some)
    origin = ResilientOrigin(open_origin(f"file://{tmp_path}"), Resilience())
    found = await list_all(origin)
    assert sorted(found) == ["dead", "f1", "f2"], "a file without a size can't be shown"
    assert not isinstance(found["dead"].meta, ObjectMeta)
    for name in ("broken", "dead"):
        error = await failure(origin, "stat", name)
        assert type(error) is RefusedError
        assert os.strerror(number) in str(error)
    assert origin.state()["retries"] == 0
    await origin.aclose()


def test_local_errors() -> None:
    dead = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    assert type(from_os("f", dead, root_answers=True)) is RefusedError
    assert type(from_os("f", dead, root_answers=False)) is OriginUnavailableError
    busy = OSError(errno.EMFILE, "Too many open files")
    assert type(from_os("f", busy, root_answers=True)) is OriginUnavailableError


# HDFS


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('RPCError("org.apache.hadoop.hdfs.BlockMissingException", "trace")', RefusedError),
        ('RPCError("java.lang.IllegalArgumentException", "trace")', RefusedError),
        ("BlocksNotFound(...)", RefusedError),
        ('RPCError("org.apache.hadoop.ipc.StandbyException", "trace")', OriginUnavailableError),
        ("DataTransferError(...)", OriginUnavailableError),
    ],
)
def test_hdfs(text: str, kind: type[OriginError]) -> None:
    assert type(from_hdfs_native("f", RuntimeError(text))) is kind
