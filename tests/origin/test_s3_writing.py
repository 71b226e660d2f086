"""What `S3Writer` sends, and what it makes of answers that no real server here gives."""

import contextlib
import errno
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
import trio
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    ConflictError,
    CredentialsError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    SpoolError,
)
from cachefs.fuse.errno_map import errno_of
from cachefs.origin.fsspec import local_writer
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3 import bodies
from cachefs.origin.s3.bodies import MOST_BYTES
from cachefs.origin.s3.signing import sign
from cachefs.origin.s3.writing import messages
from cachefs.origin.s3.writing.writer import S3Writer
from cachefs.origin.writable import (
    ABSENT,
    Attributes,
    BufferContent,
    Condition,
    Guarantees,
    PartTag,
    Upload,
)
from cachefs.types import Buffer, ObjectMeta
from tests.servers.told_s3 import Answer, Asked, ToldS3

CREDENTIALS = ReadOnlyCredentials("AKID", "secret", "token")
UPLOAD = Upload("a", "an id", "write")
META = ObjectMeta(3, 0, '"one"')
FED = MOST_BYTES + 1


@asynccontextmanager
async def told(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[Asked], Answer],
    url: str = "s3://bucket/dir",
    options: OriginOptions | None = None,
) -> AsyncIterator[tuple[ToldS3, S3Writer]]:
    with ToldS3(answer) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        origin = open_origin(url, options)
        assert isinstance(origin.writer, S3Writer)
        origin.writer.guarantees = Guarantees()
        yield server, origin.writer
        await origin.aclose()


def error(code: str, status: int) -> Answer:
    return Answer(f"<?xml version='1.0'?>\n<Error><Code>{code}</Code></Error>".encode(), status)


def test_signatures_are_those_of_botocore() -> None:
    headers = {
        "content-md5": "1B2M2Y8AsgTpgAmY7PhCfg==",
        "if-none-match": "*",
        "x-amz-meta-mode": "33188",
        "x-amz-copy-source": "/bucket/a%20b",
    }
    query = messages.query_of(partNumber="7", uploadId="a/b+c=")
    request = AWSRequest("PUT", f"http://host:1/b/a%20b?{query}", dict(headers))
    request.data = b"body"
    signer = S3SigV4Auth(CREDENTIALS, "s3", "eu-west-1")
    request.context["payload_signing_enabled"] = True
    signer.add_auth(request)
    sha256 = hashlib.sha256(b"body").hexdigest()
    now_s = seconds_of(request.headers["X-Amz-Date"])
    found = sign(
        CREDENTIALS, "eu-west-1", "PUT", "host:1", "/b/a%20b", query, headers, sha256, now_s
    )
    assert found["authorization"] == request.headers["Authorization"]


def seconds_of(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("mtime_ns", "text"),
    [
        (1_700_000_000_000_000_000, "1700000000"),
        (1_700_000_000_123_456_789, "1700000000.123456789"),
        (1_700_000_000_500_000_000, "1700000000.5"),
        (0, "0"),
        (-500_000_000, "-0.5"),
        (-1_500_000_000, "-1.5"),
        (-2_000_000_000, "-2"),
    ],
)
def test_times_are_written_as_rclone_does(mtime_ns, text) -> None:
    headers = messages.metadata(Attributes(mtime_ns=mtime_ns), "id")
    assert headers == {"x-amz-meta-cachefs-write": "id", "x-amz-meta-mtime": text}


def test_modes_are_written_as_s3fs_does() -> None:
    headers = messages.metadata(Attributes(0o640, 1000, 100), "id")
    assert headers["x-amz-meta-mode"] == str(0o100640)
    assert (headers["x-amz-meta-uid"], headers["x-amz-meta-gid"]) == ("1000", "100")


def test_the_e_tag_of_parts_is_the_md5_of_their_md5s() -> None:
    digests = [hashlib.md5(data).digest() for data in (b"one", b"two")]
    parts = [PartTag(n, 3, f'"{digest.hex()}"') for n, digest in enumerate(digests, 1)]
    whole = hashlib.md5(b"".join(digests)).hexdigest()
    assert messages.expected_e_tag(reversed(parts)) == f'"{whole}-2"'
    assert messages.expected_e_tag([PartTag(1, 3, '"encrypted"')]) is None
    assert messages.is_same_e_tag(f"{whole.upper()}-2", f'"{whole}-2"')


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("SlowDown", 503, OriginBusyError),
        ("InternalError", 500, OriginUnavailableError),
        ("RequestTimeout", 400, OriginUnavailableError),
        ("ConditionalRequestConflict", 409, OriginUnavailableError),
        ("BadDigest", 400, BadDataError),
        ("PreconditionFailed", 412, ConflictError),
        ("FileAlreadyExists", 409, ConflictError),
        ("AccessDenied", 403, AccessDeniedError),
        ("ExpiredToken", 400, CredentialsError),
        ("NoSuchBucket", 404, NotFoundError),
    ],
)
async def test_refusals(monkeypatch, code, status, kind) -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(b"", 404) if asked.method == "HEAD" else error(code, status)

    async with told(monkeypatch, answer) as (_, writer):
        with pytest.raises(kind):
            await writer.put("a", b"one")


@pytest.mark.parametrize(
    ("code", "status", "number"),
    [
        ("QuotaExceeded", 403, errno.EDQUOT),
        ("XMinioAdminBucketQuotaExceeded", 400, errno.EDQUOT),
        ("XMinioStorageFull", 507, errno.ENOSPC),
        ("XMinioStorageFull", 200, errno.ENOSPC),
        ("InsufficientStorageSpace", 409, errno.ENOSPC),
        ("", 507, errno.ENOSPC),
        ("RequestQuotaExceeded", 503, errno.EIO),
    ],
)
async def test_a_store_without_room(monkeypatch, code: str, status: int, number: int) -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(b"", 404) if asked.method == "HEAD" else error(code, status)

    async with told(monkeypatch, answer) as (server, writer):
        with pytest.raises(OriginError) as caught:
            await writer.put("a", b"one")
        assert errno_of(caught.value) == number
        with pytest.raises(OriginError) as caught:
            await writer.complete(UPLOAD, [PartTag(1, 3, '"x"')])
        assert errno_of(caught.value) == number
    assert len(server.asked) == 2  # it is no refusal of this request that another one could avoid


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_local_disk_without_room(number: int) -> None:
    found = local_writer._from_os("file:///a", OSError(number, "no room"))
    assert errno_of(found) == number
    assert not isinstance(found, OriginUnavailableError)


async def test_a_definite_refusal_is_not_tried_again(monkeypatch) -> None:
    async with told(monkeypatch, lambda _: error("EntityTooLarge", 400)) as (_, writer):
        with pytest.raises(OriginError, match=r"the store refuses it \(HTTP 400") as caught:
            await writer.put("a", b"one")
    assert not isinstance(caught.value, OriginUnavailableError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalError", OriginUnavailableError),
        ("SlowDown", OriginBusyError),
        ("AccessDenied", AccessDeniedError),
    ],
)
async def test_errors_inside_an_answer_are_errors(monkeypatch, code, kind) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return Answer(b"", 200, {"ETag": '"one"'}, 3)
        return Answer(b"   \n\n " + error(code, 200).body, 200)

    async with told(monkeypatch, answer) as (_, writer):
        with pytest.raises(kind):
            await writer.complete(UPLOAD, [PartTag(1, 3, '"x"')])
        with pytest.raises(kind):
            await writer.copy("a", META, "b")
        with pytest.raises(kind):
            await writer.copy_part(UPLOAD, 1, 0, "a", META, 3)


@pytest.mark.parametrize("e_tag", ['"abc"', "abc", "&quot;abc&quot;", "&#34;abc&#34;"])
async def test_e_tags_may_come_without_quotes(monkeypatch, e_tag) -> None:
    body = f"<CompleteMultipartUploadResult><ETag>{e_tag}</ETag></CompleteMultipartUploadResult>"
    async with told(monkeypatch, lambda _: Answer(body.encode())) as (_, writer):
        found = await writer.complete(UPLOAD, [PartTag(1, 3, '"x"')])
    assert (found.version, found.size_bytes) == ('"abc"', 3)


async def test_what_an_answer_without_an_e_tag_leaves_open_a_head_tells(monkeypatch) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return Answer(b"", 200, {"ETag": '"abc"'}, 3)
        return Answer()

    async with told(monkeypatch, answer) as (_, writer):
        assert (await writer.put("a", b"one")).version == '"abc"'


async def test_oss_has_a_header_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "b")
    answer = Answer(b"", 200, {"ETag": '"abc"'})
    with ToldS3(lambda _: answer) as server:
        monkeypatch.setenv("http_proxy", server.endpoint)  # nothing resolves bucket.localhost
        monkeypatch.setenv("no_proxy", "")
        origin = open_origin("oss://bucket/dir", OriginOptions("http://localhost:1"))
        assert origin.writer is not None
        origin.writer.guarantees = Guarantees()
        await origin.writer.put("a", b"one", ABSENT)
        await origin.aclose()
    assert server.asked[-1].headers["x-oss-forbid-overwrite"] == "true"
    assert "if-none-match" not in server.asked[-1].headers


async def test_objects_that_could_not_be_deleted_are_named(monkeypatch) -> None:
    body = (
        b"<DeleteResult><Error><Key>dir/a&amp;b</Key><Code>AccessDenied</Code></Error>"
        b"<Error><Key>dir/c</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    async with told(monkeypatch, lambda _: Answer(body)) as (server, writer):
        failed = await writer.delete_many(["a&b", "c", "d/"])
    assert list(failed) == ["a&b"]
    assert isinstance(failed["a&b"], AccessDeniedError)
    sent = server.asked[-1]
    assert sent.query == {"delete": ""}
    assert b"<Key>dir/a&amp;b</Key>" in sent.body
    assert b"<Key>dir/d/</Key>" in sent.body
    assert "content-md5" in sent.headers


async def test_a_read_only_bucket_gives_one_clear_line(monkeypatch) -> None:
    def answer(asked: Asked) -> Answer:
        return error("AccessDenied", 403) if asked.method != "HEAD" else Answer(b"", 404)

    async with told(monkeypatch, answer) as (_, writer):
        with pytest.raises(AccessDeniedError) as caught:
            await writer.check_writable()
    assert "can't be written: access denied (HTTP 403 AccessDenied" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_bucket_in_which_nothing_can_be_deleted(monkeypatch) -> None:
    objects: dict[str, Asked] = {}

    def answer(asked: Asked) -> Answer:
        if asked.method == "DELETE" and "uploadId" not in asked.query:
            return error("AccessDenied", 403)
        return store(objects, asked)

    async with told(monkeypatch, answer) as (server, writer):
        with pytest.raises(AccessDeniedError, match=r"objects may not be deleted"):
            await writer.check_writable()
        assert objects == {}
        assert {asked.method for asked in server.asked} == {"DELETE"}, "nothing was written"


def store(objects: dict[str, Asked], asked: Asked) -> Answer:
    """A store that knows no condition and keeps no metadata."""
    if asked.method == "HEAD":
        found = objects.get(asked.path)
        if found is None:
            return Answer(b"", 404)
        e_tag = hashlib.md5(found.body).hexdigest()
        return Answer(b"", 200, {"ETag": f'"{e_tag}"'}, len(found.body))
    if "uploads" in asked.query:
        return Answer(b"<UploadId>u</UploadId>")
    if "if-match" in asked.headers or "if-none-match" in asked.headers:
        return error("NotImplemented", 501)
    if "x-amz-copy-source" in asked.headers:
        objects[asked.path] = asked._replace(body=b"copy")
        return Answer(b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
    if asked.method == "POST":
        objects[asked.path] = asked._replace(body=b"joined")
        return Answer(b"<CompleteMultipartUploadResult><ETag>x</ETag></C>")
    if asked.method == "PUT":
        objects[asked.path] = asked
        return Answer(b"", 200, {"ETag": f'"{hashlib.md5(asked.body).hexdigest()}"'})
    if "uploadId" not in asked.query:
        objects.pop(asked.path, None)
    return Answer(b"", 204)


async def test_a_store_that_knows_no_condition(monkeypatch) -> None:
    objects: dict[str, Asked] = {}
    async with told(monkeypatch, lambda asked: store(objects, asked)) as (_, writer):
        found = await writer.check_writable()
        assert not any(getattr(found, name) for name in found.__slots__ if name != "delete_version")
        assert objects == {}
        await writer.put("a", b"one", ABSENT)
        with pytest.raises(ConflictError):
            await writer.put("a", b"two", ABSENT)
        with pytest.raises(ConflictError):
            await writer.put("a", b"two", Condition('"other"'))
        version = f'"{hashlib.md5(b"one").hexdigest()}"'
        await writer.put("a", b"two", Condition(version))
        assert objects["/bucket/dir/a"].body == b"two"


@pytest.mark.parametrize("size_bytes", [3, FED])
async def test_a_connection_that_the_server_has_closed_is_replaced(monkeypatch, size_bytes) -> None:
    sizes: list[int] = []

    def answer(asked: Asked) -> Answer:
        sizes.append(len(asked.body))
        breaks_after_bytes = -1 if len(sizes) == 2 else None
        return Answer(b"", 200, {"ETag": '"abc"'}, breaks_after_bytes=breaks_after_bytes)

    async with told(monkeypatch, answer) as (_, writer):
        await writer.put("a", bytes(size_bytes))
        await writer.put("a", bytes(size_bytes))
    assert sizes == [size_bytes] * 3


@contextlib.asynccontextmanager
async def answering(answer: bytes, *, reads: bool = True) -> AsyncIterator[S3Writer]:
    """A server that sends these bytes for one request and hangs up, perhaps without reading."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                with accepted:
                    if reads:
                        accepted.recv(65536)
                    accepted.sendall(answer)
                    accepted.shutdown(socket.SHUT_WR)
                    while accepted.recv(65536):  # a reset would drop the answer
                        pass

    origin = open_origin(
        "s3://bucket/dir",
        OriginOptions(f"http://127.0.0.1:{listener.getsockname()[1]}", anonymous=True),
    )
    assert isinstance(origin.writer, S3Writer)
    origin.writer.guarantees = Guarantees()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, serve)
        try:
            yield origin.writer
        finally:
            await origin.aclose()
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


CHUNKED = b'HTTP/1.1 %s\r\nETag: "abc"\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n'
DENIED = b"<Error><Code>AccessDenied</Code></Error>"


@pytest.mark.parametrize("size_bytes", [3, FED])
@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nETag: "abc"\r\nContent-Length: 0\r\n\r\n',
        b'HTTP/1.1 200 OK\r\nETag: "abc"\r\nContent-Length: 2\r\n\r\nok',
        b'HTTP/1.1 200 OK\r\nETag: "abc"\r\n\r\nuntil the end',
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nETag: "abc"\r\nContent-Length: 0\r\n\r\n',
        CHUNKED % (b"200 OK", 2, b"ok"),
    ],
)
async def test_all_forms_of_a_success_are_understood(answer: bytes, size_bytes: int) -> None:
    async with answering(answer) as writer:
        meta = await writer.put("a", bytes(size_bytes))
    assert meta.size_bytes == size_bytes
    assert "abc" in meta.version


@pytest.mark.parametrize("size_bytes", [3, FED])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CHUNKED % (b"500 Oh", len(DENIED), DENIED), OriginUnavailableError),
        (CHUNKED % (b"403 No", len(DENIED), DENIED), AccessDeniedError),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", OriginBusyError),
        (b"HTTP/1.1 403 No\r\nConnection: close\r\n\r\nno", AccessDeniedError),
        (b'HTTP/1.1 200 OK\r\nETag: "abc"\r\nContent-Le', OriginUnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", OriginUnavailableError),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", OriginUnavailableError),
        (b"", OriginUnavailableError),
    ],
)
async def test_no_other_answer_is_a_success(
    answer: bytes, expected: type[OriginError], size_bytes: int
) -> None:
    async with answering(answer) as writer:
        with pytest.raises(OriginError) as caught:
            await writer.put("a", bytes(size_bytes), Condition('"one"'))
    assert type(caught.value) is expected


async def test_an_answer_before_the_body_is_read() -> None:
    early = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with answering(early, reads=False) as writer:
        with pytest.raises(AccessDeniedError):
            await writer.put("a", bytes(MOST_BYTES))


async def test_a_cancelled_write_breaks_its_connection() -> None:
    """What is sent late must not arrive late, when it could replace newer bytes."""
    has_begun, has_ended = trio.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted, contextlib.suppress(OSError):
            while accepted.recv(65536):
                token.run_sync_soon(has_begun.set)
        token.run_sync_soon(has_ended.set)

    options = OriginOptions(
        f"http://127.0.0.1:{listener.getsockname()[1]}", anonymous=True, idle_timeout_s=3600
    )
    origin = open_origin("s3://bucket/dir", options)
    assert origin.writer is not None
    with trio.fail_after(300):
        async with trio.open_nursery() as serving:
            serving.start_soon(trio.to_thread.run_sync, serve)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(origin.writer.put, "a", b"one")
                await has_begun.wait()
                nursery.cancel_scope.cancel()
            await has_ended.wait()
    await origin.aclose()
    listener.close()


async def test_requests_are_counted_by_kind(monkeypatch) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "PUT" and asked.path.endswith("denied"):
            return error("AccessDenied", 403)
        body = b"<R><UploadId>an id</UploadId><ETag>&quot;e&quot;</ETag></R>"
        return Answer(b"" if asked.method == "DELETE" else body, headers={"ETag": '"e"'})

    async with told(monkeypatch, answer) as (_, writer):
        await writer.put("a", b"four")
        await writer.start_upload("a")
        await writer.put_part(UPLOAD, 1, 0, b"part 1")
        await writer.copy_part(UPLOAD, 2, 6, "a", META, 3)
        await writer.copy("a", META, "b")
        await writer.abort(UPLOAD)
        await writer.delete("a")
        with pytest.raises(AccessDeniedError):
            await writer.put("denied", b"not sent")
        found = writer._sender._counters.writes
    kinds = (found.puts, found.parts, found.copies, found.deletes, found.uploads)
    assert kinds == (2, 1, 2, 1, 2)
    assert (found.sent_bytes, found.errors) == (10, 1)


WANTS_MD5 = (
    b"<Error><Code>InvalidRequest</Code><Message>Content-MD5 OR x-amz-checksum- HTTP header is "
    b"required for Put Object requests with Object Lock parameters</Message></Error>"
)


@pytest.mark.parametrize("size_bytes", [0, 3, FED])
async def test_a_bucket_with_object_lock_gets_checksums(monkeypatch, size_bytes: int) -> None:
    body = bytes(size_bytes)
    md5 = bodies.as_header(hashlib.md5(body).digest())

    def answer(asked: Asked) -> Answer:
        is_body = asked.method == "PUT" and "x-amz-copy-source" not in asked.headers
        if is_body and asked.headers.get("content-md5") != md5:
            return Answer(WANTS_MD5, 400)
        return Answer(b"<R><ETag>e</ETag></R>", headers={"ETag": '"e"'})

    async with told(monkeypatch, answer) as (server, writer):
        await writer.put("a", body)
        await writer.put_part(UPLOAD, 1, 0, body)
        await writer.copy("a", META, "b")
        assert len(server.asked) == 4  # what was found out is remembered
    async with told(monkeypatch, answer) as (server, writer):
        await writer.put_part(UPLOAD, 1, 0, body)
        assert len(server.asked) == 2


async def test_a_bad_request_of_another_kind_is_sent_twice_at_most(monkeypatch) -> None:
    async with told(monkeypatch, lambda _: error("InvalidRequest", 400)) as (server, writer):
        for requests in (2, 4):
            with pytest.raises(OriginError, match="the store refuses it"):
                await writer.put("a", b"one")
            assert len(server.asked) == requests


async def test_what_new_objects_get_is_stated_wherever_one_is_made(monkeypatch) -> None:
    options = OriginOptions(
        sse="aws:kms",
        sse_kms_key="arn:aws:kms:eu-west-1:1:key/2",
        storage_class="STANDARD_IA",
        acl="bucket-owner-full-control",
        tags="team=a b&run=1%262",
    )
    wanted = {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:eu-west-1:1:key/2",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-acl": "bucket-owner-full-control",
        "x-amz-tagging": "team=a%20b&run=1%262",
    }

    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return Answer(b"", 404)
        if asked.is_list:
            return Answer(b"<ListBucketResult></ListBucketResult>")
        body = b"<R><UploadId>an id</UploadId><ETag>&quot;e&quot;</ETag></R>"
        return Answer(body, headers={"ETag": '"e"'})

    async with told(monkeypatch, answer, options=options) as (server, writer):
        await writer.put("a", b"one")
        await writer.put("b", bytes(FED))
        await writer.make_directory("d")
        upload = await writer.start_upload("a")
        await writer.copy("a", META, "c")
        made = [a for a in server.asked if a.method in ("PUT", "POST")]
        assert len(made) == 5
        for asked in made:
            is_copy = "x-amz-copy-source" in asked.headers
            stated = {n: v for n, v in wanted.items() if not is_copy or n != "x-amz-tagging"}
            assert {n: v for n, v in asked.headers.items() if n in wanted} == stated
        await writer.put_part(upload, 1, 0, b"one")
        await writer.copy_part(upload, 2, 0, "a", META, 3)
        await writer.complete(upload, [PartTag(1, 3, '"x"')])
        assert not any(wanted.keys() & asked.headers.keys() for asked in server.asked[-3:])


@pytest.mark.parametrize("reads", [0, 5])
async def test_the_spool_fails_and_not_the_store(
    monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """While the body is hashed, and while it is sent."""
    left = reads

    class OnBadDisk(BufferContent):
        is_in_memory = False

        def read(self, offset: int, length: int) -> Buffer:
            nonlocal left
            if not left:
                raise SpoolError("the disk is broken")
            left -= 1
            return super().read(offset, length)

    async with told(monkeypatch, lambda _: Answer(b"")) as (server, writer):
        with pytest.raises(SpoolError, match="the disk is broken"):
            await writer.put_part(UPLOAD, 1, 0, OnBadDisk(bytes(4 << 20)))
        assert all(len(asked.body) < 4 << 20 for asked in server.asked)
