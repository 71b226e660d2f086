"""What only S3 has: odd keys, credentials, endpoints, and servers that misbehave."""

import itertools
import os
import socket
import time
from pathlib import Path

import pytest

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    CredentialsError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
    UsageError,
)
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import Entry, ObjectMeta
from tests.origin.listing import list_all
from tests.servers.told_s3 import Answer, Asked, ToldS3

_buckets = itertools.count()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    """No AWS settings but those that a test makes; no role of the machine either."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def as_user(monkeypatch):
    def apply(server):
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return server

    return apply


@pytest.fixture
def moto(moto_s3, as_user):
    return as_user(moto_s3)


@pytest.fixture
def weed(seaweedfs, as_user):
    return as_user(seaweedfs)


@pytest.fixture
def bucket(moto):
    return moto.make_bucket(f"odd-{next(_buckets)}")


@pytest.fixture
def put(moto, bucket):
    return lambda key, data=b"data": moto.put(bucket, key, data)


@pytest.fixture
async def origin(bucket):
    opened = open_origin(f"s3://{bucket}")
    yield opened
    await opened.aclose()


@pytest.fixture(params=["s3", "fsspec+s3"])
async def either(request, bucket):
    """The bucket through obstore, then through s3fs."""
    opened = open_origin(f"{request.param}://{bucket}")
    yield opened
    await opened.aclose()


# Keys that are not names


async def test_keys_that_are_no_names_are_left_out_and_counted(put, origin) -> None:
    for key in ["ok", "d/x", "a//b", "a/./c", "a/../c", "/lead", "tab\tbed", "n" * 256]:
        put(key)
    assert sorted(await list_all(origin)) == ["a", "d", "ok"]
    assert sum(origin.counters.unshown_in_dir.values()) == 3
    assert origin.counters.unshown_keys == 3  # "/", "tab\tbed", the long one
    assert await list_all(origin, "a") == {}
    assert origin.counters.unshown_keys == 6
    assert await origin.stat("a") is None


async def test_backslash(put, origin) -> None:
    put("back\\slash/fi\\le", b"12")
    assert list(await list_all(origin)) == ["back\\slash"]
    meta = (await list_all(origin, "back\\slash"))["fi\\le"].meta
    assert await origin.stat("back\\slash/fi\\le") == meta
    assert bytes(await origin.read("back\\slash/fi\\le", meta, 0, 2)) == b"12"


async def test_markers(put, either) -> None:
    put("dir/", b"")
    put("dir/f")
    put("dir/sub/", b"")
    put("hollow/", b"")
    assert sorted(await list_all(either)) == ["dir", "hollow"]
    listed = await list_all(either, "dir")
    assert sorted(listed) == ["f", "sub"]
    assert listed["sub"].meta is None
    assert await list_all(either, "hollow") == {}
    assert await either.stat("hollow") is None
    assert await either.stat("dir/sub") is None
    assert either.counters.unshown_keys == 0


async def test_markers_with_content_are_counted(put, origin) -> None:
    put("dir/", b"content that no name leads to")
    put("dir/f")
    put("d/e/", b"content")
    assert sorted(await list_all(origin)) == ["d", "dir"]
    assert sorted(await list_all(origin, "dir")) == ["f"]
    assert sorted(await list_all(origin, "d")) == ["e"]
    assert await list_all(origin, "d/e") == {}
    assert origin.counters.unshown_in_dir == {"dir": 1, "d/e": 1}
    below: dict[str, list[Entry]] = {}
    async for _ in origin.list_dir("", below):
        pass
    assert sum(origin.counters.unshown_in_dir.values()) == 2


async def test_key_that_is_file_and_prefix(put, either) -> None:
    put("full", b"data")
    put("full-1")
    put("full/below")
    put("empty", b"")
    put("empty!")
    put("empty/below")
    put("last", b"")
    listed = await list_all(either)
    assert sorted(listed) == ["empty", "empty!", "full", "full-1", "last"]
    assert listed["empty"].meta is None
    for name, entry in listed.items():
        assert await either.stat(name) == entry.meta
    assert either.counters.unshown_in_dir == {"": 1}, "full/"
    with pytest.raises(NotADirError):
        await list_all(either, "last")


async def test_twins_pages_apart(moto, put, bucket, origin) -> None:
    objects = {f"a-{i:04}": b"x" for i in range(1100)} | {"a/below": b"x", "e/below": b"x"}
    moto.put_many(bucket, objects)
    put("a", b"file")
    put("e", b"")
    listed = await list_all(origin)
    assert len(listed) == 1102
    assert isinstance(listed["a"].meta, ObjectMeta)
    assert listed["e"].meta is None
    assert origin.counters.unshown_in_dir == {"": 1}
    assert origin.counters.lists == 2


async def test_prefix_with_parts_that_are_no_names(bucket) -> None:
    for prefix in ["a//b", "..", "a/./b"]:
        with pytest.raises(UsageError):
            open_origin(f"s3://{bucket}/{prefix}")


async def test_prefix_is_the_root(put, bucket) -> None:
    put("some/prefix/f", b"in")
    put("some/prefixed", b"out")
    origin = open_origin(f"s3://{bucket}/some/prefix/")
    await origin.check()
    assert origin.url == f"s3://{bucket}/some/prefix"
    listed = await list_all(origin)
    assert list(listed) == ["f"]
    assert bytes(await origin.read("f", listed["f"].meta, 0, 2)) == b"in"
    await origin.aclose()


# What a mount meets at its start


async def fails(url: str, kind: type[OriginError], options: OriginOptions | None = None) -> str:
    """`check` must fail in time (5 s on a quiet machine), with one line that tells no secret;
    returns the line."""
    origin = open_origin(url, options)
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        await origin.check()
    assert time.monotonic() - started < 50
    await origin.aclose()
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message.lower()
    assert len(message) < 250
    return message


async def test_missing_bucket(weed) -> None:
    message = await fails("s3://no-such-bucket/x", NotFoundError)
    assert message == f"bucket no-such-bucket does not exist at {weed.endpoint}"


async def test_empty_bucket_and_empty_prefix(weed, expect_log) -> None:
    weed.make_bucket("hollow")
    origin = open_origin("s3://hollow")
    await origin.check()
    assert await list_all(origin) == {}
    await origin.aclose()
    expect_log(f"there is nothing under s3://hollow/pre at {weed.endpoint}")
    origin = open_origin("s3://hollow/pre")
    await origin.check()
    assert await list_all(origin) == {}
    weed.put("hollow", "pre/a", b"x")
    assert list(await list_all(origin)) == ["a"]
    await origin.aclose()


async def test_wrong_secret_and_wrong_key(weed, monkeypatch) -> None:
    weed.make_bucket("guarded")
    weed.put("guarded", "f", b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    assert "guarded" in await fails("s3://guarded", AccessDeniedError)
    origin = open_origin("s3://guarded")
    for request in [origin.stat("f"), origin.read("f", ObjectMeta(1, 0, '"x"'), 0, 1)]:
        with pytest.raises(AccessDeniedError) as caught:
            await request
        assert "secret" not in str(caught.value).lower()
        assert weed.endpoint in str(caught.value)
    await origin.aclose()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDWRONG")
    assert "AKIDWRONG" not in await fails("s3://guarded", AccessDeniedError)


async def test_anonymous_is_refused_by_a_private_bucket(weed) -> None:
    weed.make_bucket("private")
    await fails("s3://private", AccessDeniedError, OriginOptions(anonymous=True))


async def test_anonymous_needs_no_credentials(moto, bucket, put, monkeypatch) -> None:
    put("f", b"12")
    moto.client.put_object_acl(Bucket=bucket, Key="f", ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    origin = open_origin(f"s3://{bucket}", OriginOptions(anonymous=True))
    meta = (await list_all(origin))["f"].meta
    assert bytes(await origin.read("f", meta, 0, 2)) == b"12"
    await origin.aclose()


async def test_refused_connection() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{sock.getsockname()[1]}"
        options = OriginOptions(endpoint=endpoint, anonymous=True)
        assert endpoint in await fails("s3://b", OriginUnavailableError, options)


async def test_unknown_host() -> None:
    options = OriginOptions(endpoint="http://no-such-host.invalid", anonymous=True)
    await fails("s3://b", OriginUnavailableError, options)


@pytest.mark.long
async def test_endpoint_that_never_answers(mute_endpoint) -> None:
    options = OriginOptions(endpoint=mute_endpoint, anonymous=True)
    await fails("s3://b", OriginUnavailableError, options)


@pytest.mark.long
async def test_no_credentials_anywhere(monkeypatch, mute_endpoint) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", mute_endpoint)
    options = OriginOptions(endpoint="http://127.0.0.1:1")
    assert "AWS_ACCESS_KEY_ID" in str(await no_credentials(options))


async def no_credentials(options: OriginOptions) -> CredentialsError:
    origin = open_origin("s3://b", options)
    started = time.monotonic()
    with pytest.raises(CredentialsError) as caught:
        await origin.check()
    assert time.monotonic() - started < 50
    await origin.aclose()
    return caught.value


@pytest.fixture
def mute_endpoint():
    """Accepts connections and never says a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


# Where settings come from


async def test_profile_gives_credentials_and_endpoint(moto, put, bucket, monkeypatch) -> None:
    put("f")
    for name in moto.environment:
        if name != "AWS_EC2_METADATA_DISABLED":
            monkeypatch.delenv(name)
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        f"[profile team]\nregion = eu-west-1\nendpoint_url = {moto.endpoint}\n"
    )
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text(
        "[team]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    origin = open_origin(f"s3://{bucket}", OriginOptions(profile="team"))
    await origin.check()
    assert (await origin.stat("f")) is not None
    await origin.aclose()
    with pytest.raises(UsageError, match="'nobody' does not exist"):
        open_origin(f"s3://{bucket}", OriginOptions(profile="nobody"))


def base_url(options: OriginOptions, url: str = "s3://my-data/p") -> str:
    return open_origin(url, options)._target.base_url


async def test_addressing(monkeypatch) -> None:
    assert base_url(OriginOptions()) == "https://my-data.s3.us-east-1.amazonaws.com"
    assert base_url(OriginOptions(region="cn-north-1")).endswith(".cn-north-1.amazonaws.com.cn")
    assert base_url(OriginOptions(addressing="path")).endswith("amazonaws.com/my-data")
    assert base_url(OriginOptions(), "s3://do.ts").endswith("amazonaws.com/do.ts")
    minio = "http://minio:9000"
    assert base_url(OriginOptions(endpoint=minio + "/")) == "http://minio:9000/my-data"
    virtual = OriginOptions(endpoint=minio, addressing="virtual")
    assert base_url(virtual) == "http://my-data.minio:9000"
    oss = OriginOptions(endpoint="https://oss-cn-hangzhou.aliyuncs.com")
    assert base_url(oss) == "https://my-data.oss-cn-hangzhou.aliyuncs.com"
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert "eu-north-1" in base_url(OriginOptions())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one")
    assert base_url(OriginOptions()) == "http://one/my-data"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two")
    assert base_url(OriginOptions()) == "http://two/my-data"
    assert base_url(OriginOptions(endpoint="http://three")) == "http://three/my-data"


@pytest.mark.parametrize("endpoint", ["minio:9000", "ftp://x", "http://", "http://u:secret@h"])
async def test_bad_endpoint(endpoint) -> None:
    with pytest.raises(UsageError) as caught:
        open_origin("s3://b", OriginOptions(endpoint=endpoint))
    assert "secret" not in str(caught.value)


async def test_identity_is_free_of_the_way_there() -> None:
    here = open_origin("s3://b/p/", OriginOptions(anonymous=True))
    there = open_origin("s3://b/p", OriginOptions(addressing="path"))
    assert here.identity == there.identity == "s3://b/p"
    minio = OriginOptions(endpoint="http://minio:9000")
    for url in ["s3://b/p", "fsspec+s3://b/p"]:
        assert open_origin(url, minio).identity == "s3+minio:9000://b/p"


async def test_ca_bundle_that_is_missing(monkeypatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/file.pem")
    with pytest.raises(UsageError, match=r"/no/such/file\.pem"):
        open_origin("s3://b")


async def test_configuration_that_is_no_configuration() -> None:
    Path(os.environ["AWS_CONFIG_FILE"]).write_text("region = nowhere\n[")
    with pytest.raises(UsageError, match="config"):
        open_origin("s3://b")


# Servers that misbehave


class Fake:
    """An S3 that answers with what the test put into `answers`, the last one again and again."""

    origin: Origin

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.seen: list[dict[str, str]] = []

    def answer(self, asked: Asked) -> Answer:
        self.seen.append(asked.headers)
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Answer(body, status, {"Connection": "close", **headers})


@pytest.fixture
async def fake():
    told = Fake()
    with ToldS3(told.answer) as server:
        options = OriginOptions(endpoint=server.endpoint, anonymous=True)
        told.origin = open_origin("s3://b", options)
        yield told
        await told.origin.aclose()


DATE = {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}
META = ObjectMeta(4, 1_793_613_600_000_000_000, '"one"')


async def test_server_that_ignores_if_match(fake) -> None:
    fake.answers = [(200, DATE | {"ETag": '"two"'}, b"data")]
    with pytest.raises(ObjectChangedError):
        await fake.origin.read("f", META, 0, 4)
    assert fake.seen[0]["if-match"] == '"one"'
    assert "range" not in fake.seen[0]


async def test_server_without_etags(fake) -> None:
    fake.answers = [(200, DATE, b"data")]
    meta = await fake.origin.stat("f")
    assert meta == ObjectMeta(4, META.mtime_ns, f"{META.mtime_ns}-4")
    assert bytes(await fake.origin.read("f", meta, 0, 4)) == b"data"
    assert "if-match" not in fake.seen[1]
    later = {"Last-Modified": "Mon, 02 Nov 2026 10:00:01 GMT"}
    fake.answers = [(200, later, b"atad")]
    with pytest.raises(ObjectChangedError):
        await fake.origin.read("f", meta, 0, 4)


async def test_weak_etag_is_compared_but_not_asked_for(fake) -> None:
    fake.answers = [(200, DATE | {"ETag": 'W/"one"'}, b"data")]
    meta = await fake.origin.stat("f")
    assert bytes(await fake.origin.read("f", meta, 0, 4)) == b"data"
    assert "if-match" not in fake.seen[1]


async def test_shorter_object_with_the_same_etag(fake) -> None:
    fake.answers = [(200, DATE | {"ETag": '"one"'}, b"dat")]
    with pytest.raises(BadDataError):
        await fake.origin.read("f", META, 0, 4)
    assert fake.origin.counters.errors == 1


async def test_range_beyond_the_end_means_changed(fake) -> None:
    fake.answers = [(416, {}, b"<Error><Code>InvalidRange</Code></Error>")]
    with pytest.raises(ObjectChangedError):
        await fake.origin.read("f", META, 1, 3)


async def test_server_errors(fake) -> None:
    fake.answers = [(503, {}, b"<Error><Code>SlowDown</Code></Error>")]
    with pytest.raises(OriginBusyError):
        await fake.origin.read("f", META, 0, 4)
    fake.answers = [(503, {"Retry-After": "7"}, b"<Error><Code>SlowDown</Code></Error>")]
    with pytest.raises(OriginBusyError, match="503 SlowDown") as caught:
        await list_all(fake.origin)
    assert caught.value.retry_after_s == 7
    # Whoever wants more tries wraps the origin (`resilience`).
    assert (fake.origin.counters.gets, fake.origin.counters.lists) == (1, 1)
    assert len(fake.seen) == 2


async def test_listing_survives_one_server_error(fake) -> None:
    page = b"<ListBucketResult><Contents/></ListBucketResult>"
    page = page.replace(
        b"<Contents/>",
        b"<Contents><Key>f</Key><Size>4</Size><ETag>one</ETag>"
        b"<LastModified>2026-11-02T10:00:00.123Z</LastModified></Contents>",
    )
    fake.answers = [(500, {}, b""), (200, {}, b"<html>"), (200, {}, page)]
    assert (await list_all(ResilientOrigin(fake.origin, Resilience())))["f"].meta == META


async def test_listing_that_is_none(fake) -> None:
    for body in [b"<html>", b"", b"<x></x>", b"\xff", b"<ListBucketResult><Contents/>"]:
        fake.answers = [(200, {}, body)]
        with pytest.raises(BadDataError):
            await list_all(fake.origin)


async def test_bucket_in_another_region(fake) -> None:
    fake.answers = [(301, {"x-amz-bucket-region": "eu-west-3"}, b"<Error/>")]
    with pytest.raises(RefusedError, match="eu-west-3"):
        await fake.origin.check()


# Digests


GOOD_MD5 = '"8d777f385d3dfec8815d20f7496026dc"'  # of b"data"
DIGESTED = ObjectMeta(4, META.mtime_ns, GOOD_MD5)


@pytest.mark.parametrize("e_tag", [GOOD_MD5, GOOD_MD5.upper()])
async def test_wrong_bytes_never_come_through(fake, e_tag) -> None:
    meta = ObjectMeta(4, META.mtime_ns, e_tag)
    fake.answers = [(200, DATE | {"ETag": e_tag}, b"data")]
    assert bytes(await fake.origin.read("f", meta, 0, 4)) == b"data"
    assert len(fake.seen) == 1
    fake.answers = [(200, DATE | {"ETag": e_tag}, b"dada")]
    for _ in range(3):
        with pytest.raises(BadDataError, match="--verify-origin off"):
            await fake.origin.read("f", meta, 0, 4)
    assert fake.origin.counters.errors == 3
    fake.answers = [(206, DATE | {"ETag": e_tag, "Content-Range": "bytes 0-2/4"}, b"dad")]
    assert bytes(await fake.origin.read("f", meta, 0, 3)) == b"dad", "a part has no digest"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-server-side-encryption": "aws:kms"},
        {"x-amz-server-side-encryption": "aws:kms:dsse"},
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-oss-object-type": "Appendable"},
        {"x-oss-request-id": "1", "Content-MD5": "CY9rzUYh03PK3k6DJie09g=="},
    ],
)
async def test_e_tags_that_are_no_digests(fake, headers) -> None:
    fake.answers = [(200, DATE | {"ETag": GOOD_MD5} | headers, b"dada")]
    for _ in range(3):
        assert bytes(await fake.origin.read("f", DIGESTED, 0, 4)) == b"dada"
    assert len(fake.seen) == 4, "asked once"
    assert fake.origin.counters.errors == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-server-side-encryption": "AES256"},
        {"x-oss-request-id": "1", "Content-MD5": "jXd/OF09/siBXSD3SWAm3A=="},
    ],
)
async def test_e_tags_that_are_digests_all_the_same(fake, headers) -> None:
    fake.answers = [(200, DATE | {"ETag": GOOD_MD5} | headers, b"dada")]
    with pytest.raises(BadDataError):
        await fake.origin.read("f", DIGESTED, 0, 4)


@pytest.mark.parametrize("e_tag", [GOOD_MD5[:-1] + '-2"', '"not hex"', f"W/{GOOD_MD5}"])
async def test_e_tags_that_look_like_no_digest(fake, e_tag) -> None:
    fake.answers = [(200, DATE | {"ETag": e_tag}, b"dada")]
    meta = await fake.origin.stat("f")
    assert bytes(await fake.origin.read("f", meta, 0, 4)) == b"dada"


async def test_comparing_can_be_switched_off(fake) -> None:
    fake.answers = [(200, DATE | {"ETag": GOOD_MD5}, b"dada")]
    endpoint = fake.origin._target.endpoint
    origin = open_origin("s3://b", OriginOptions(endpoint, anonymous=True, verify_origin="off"))
    assert bytes(await origin.read("f", DIGESTED, 0, 4)) == b"dada"
    await origin.aclose()


async def test_digest_of_a_real_object_with_an_odd_key(weed) -> None:
    weed.make_bucket("digested")
    weed.put("digested", "sp ace/é%41+#", b"data")
    origin = open_origin("s3://digested")
    meta = await origin.stat("sp ace/é%41+#")
    assert meta.version == GOOD_MD5
    assert bytes(await origin.read("sp ace/é%41+#", meta, 0, 4)) == b"data"
    headers = (await origin._reader.send("HEAD", "sp ace/é%41+#")).headers
    assert headers["etag"] == GOOD_MD5
    await origin.aclose()
