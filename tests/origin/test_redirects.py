"""Redirects of a store are followed within the store only (origin/s3/redirects.py)."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest
import trio

from cachefs.errors import OriginError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3 import redirects
from cachefs.origin.s3.config import S3Target
from cachefs.origin.writable import BufferContent
from cachefs.types import ObjectMeta
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

HEADERS = {"Last-Modified": DATE, "ETag": '"one"'}
SMALL = ObjectMeta(4, 1_793_613_600_000_000_000, '"one"')
LARGE = ObjectMeta(3 << 20, 1_793_613_600_000_000_000, '"one"')


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret-token")
    with ToldS3(lambda asked: Answer(status=404)) as told:
        yield told


@pytest.fixture
def elsewhere() -> Iterator[ToldS3]:
    with ToldS3(lambda asked: Answer(b"data", headers=HEADERS)) as told:
        yield told


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[Origin]:
    opened = open_origin("s3://b", OriginOptions(endpoint=server.endpoint))
    yield opened
    await opened.aclose()


async def fails(origin: Origin, way: str) -> None:
    if way == "list":
        await anext(aiter(origin.list_dir("")))
    elif way == "look up":
        await origin.stat_and_read("f")
    elif way == "stat":
        await origin.stat("f")
    elif way == "put":
        assert origin.writer is not None
        await origin.writer.put("f", BufferContent(b"x"))
    else:
        meta = LARGE if way == "large" else SMALL
        await origin.read("f", meta, 0, meta.size_bytes)


NOT_FOLLOWED = pytest.mark.expect_log("redirects it to .* is not followed")


@NOT_FOLLOWED
@pytest.mark.parametrize("status", redirects.STATUSES)
@pytest.mark.parametrize("way", ["list", "look up", "stat", "small", "large"])
async def test_other_hosts_are_never_asked(
    server: ToldS3, elsewhere: ToldS3, origin: Origin, way: str, status: int
) -> None:
    location = {"Location": f"{elsewhere.endpoint}/b/f"}
    server.answer = lambda asked: Answer(status=status, headers=location)
    with pytest.raises(OriginError, match=r"redirects it to http://127\.0\.0\.1:\d+ ") as caught:
        await fails(origin, way)
    assert not isinstance(caught.value, OriginUnavailableError), "the next answer is the same"
    assert "--endpoint" in str(caught.value)
    assert not elsewhere.asked


@NOT_FOLLOWED
async def test_writes_are_not_redirected(server: ToldS3, elsewhere: ToldS3, origin: Origin) -> None:
    location = {"Location": f"{elsewhere.endpoint}/b/f"}
    server.answer = lambda asked: Answer(status=307, headers=location)
    with pytest.raises(OriginError, match=r"can't be written: .* redirects it to"):
        await fails(origin, "put")
    assert not elsewhere.asked


async def test_loads_do_not_follow_either(
    server: ToldS3, elsewhere: ToldS3, origin: Origin
) -> None:
    location = {"Location": f"{elsewhere.endpoint}/b/f"}
    server.answer = lambda asked: Answer(status=302, headers=location)
    assert await origin.read_many([("f", SMALL)], 1, lambda: False) == [None]
    assert origin.reads_many
    assert not elsewhere.asked


@NOT_FOLLOWED
@pytest.mark.parametrize(
    "location",
    ["//", "http://[", "file:///etc/passwd", "ftp://h/", "/b/other", "x" * 5000, "http://\x1b[2J/"],
)
async def test_odd_addresses(server: ToldS3, origin: Origin, location: str) -> None:
    server.answer = lambda asked: Answer(status=302, headers={"Location": location})
    with pytest.raises(OriginError) as caught:
        await origin.read("f", LARGE, 0, LARGE.size_bytes)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


async def test_the_same_place_again_ends(server: ToldS3, origin: Origin) -> None:
    server.answer = lambda asked: Answer(
        status=307, headers={"Location": f"{server.endpoint}/b/f?again"}
    )
    with pytest.raises(OriginError, match="without end"):
        await origin.stat("f")
    assert len(server.asked) == redirects.MOST + 1


async def test_a_redirect_within_the_store_is_signed_anew(server: ToldS3, origin: Origin) -> None:
    seen: list[Asked] = []

    def answer(asked: Asked) -> Answer:
        seen.append(asked)
        if len(seen) == 1:
            return Answer(status=307, headers={"Location": f"{server.endpoint}/b/f"})
        return Answer(b"x" * LARGE.size_bytes, headers=HEADERS)

    server.answer = answer
    assert len(await origin.read("f", LARGE, 0, LARGE.size_bytes)) == LARGE.size_bytes
    assert [asked.headers["x-amz-security-token"] for asked in seen] == ["secret-token"] * 2


def target(endpoint: str, base_url: str) -> S3Target:
    return S3Target("b", "p/", endpoint, base_url, "us-east-1", True, None)


AWS = target("https://s3.us-east-1.amazonaws.com", "https://b.s3.us-east-1.amazonaws.com")
OSS = target("https://oss-cn-hangzhou.aliyuncs.com", "https://b.oss-cn-hangzhou.aliyuncs.com")
OWN = target("https://store.example.com:9000", "https://store.example.com:9000/b")


@pytest.mark.parametrize(
    ("at", "location", "region"),
    [
        (AWS, "https://b.s3.eu-west-1.amazonaws.com/p/k", "eu-west-1"),
        (AWS, "https://b.s3-eu-west-1.amazonaws.com/p/k", "eu-west-1"),
        (AWS, "https://b.s3.dualstack.eu-west-1.amazonaws.com/p/k", "eu-west-1"),
        (AWS, "https://s3.eu-west-1.amazonaws.com/b/p/k", "eu-west-1"),
        (AWS, "https://b.s3.amazonaws.com/p/k", "us-east-1"),
        (OSS, "https://b.oss-cn-beijing-internal.aliyuncs.com/p/k", "cn-beijing"),
        (OWN, "https://store.example.com:9000/b/p/k", "us-east-1"),
        (OWN, "https://b.store.example.com:9000/p/k", "us-east-1"),
    ],
)
def test_the_stores_own_hosts(at: S3Target, location: str, region: str) -> None:
    moved = redirects.followed(at, "p/k", "s3://b/p/k", 307, {"location": location}, b"")
    assert moved is not None
    assert (f"{moved.base_url}/p/k", moved.region) == (location, region)


@pytest.mark.parametrize(
    ("at", "location"),
    [
        (AWS, "http://b.s3.eu-west-1.amazonaws.com/p/k"),
        (AWS, "https://b.s3.eu-west-1.amazonaws.com.evil.com/p/k"),
        (AWS, "https://b.s3.cn-north-1.amazonaws.com.cn/p/k"),
        (AWS, "https://other.s3.eu-west-1.amazonaws.com/p/k"),
        (AWS, "https://b.s3.eu-west-1.amazonaws.com/p/other"),
        (AWS, "https://b.s3.eu-west-1.amazonaws.com:8080/p/k"),
        (AWS, "https://u:p@b.s3.eu-west-1.amazonaws.com/p/k"),
        (AWS, "https://ec2-1-2-3-4.compute-1.amazonaws.com/b/p/k"),
        (AWS, "https://169.254.169.254/p/k"),
        (OSS, "https://evil.aliyuncs.com/b/p/k"),
        (OWN, "http://store.example.com:9000/b/p/k"),
        (OWN, "https://store.example.com/b/p/k"),
        (OWN, "https://other.example.com:9000/b/p/k"),
        (OWN, "https://b.s3.eu-west-1.amazonaws.com/p/k"),
    ],
)
def test_hosts_that_are_not_the_stores(at: S3Target, location: str) -> None:
    with pytest.raises(OriginError, match="is not followed"):
        redirects.followed(at, "p/k", "s3://b/p/k", 307, {"location": location}, b"")


@pytest.mark.parametrize("status", [301, 307])
def test_the_endpoint_in_the_body(status: int) -> None:
    body = b"<Error><Endpoint>b.s3.eu-west-1.amazonaws.com</Endpoint></Error>"
    moved = redirects.followed(AWS, "p/k", "s3://b/p/k", status, {}, body)
    assert moved is not None
    assert moved.base_url == "https://b.s3.eu-west-1.amazonaws.com"
    assert moved.region == "eu-west-1"
    assert redirects.followed(AWS, "p/k", "s3://b/p/k", 403, {}, body) is None


def test_oss_denies_what_should_go_to_another_endpoint() -> None:
    at = replace(OSS, scheme="oss")
    for host in ("oss-cn-beijing.aliyuncs.com", "b.oss-cn-beijing.aliyuncs.com"):
        body = named("AccessDenied", f"<Endpoint>{host}</Endpoint>")
        moved = redirects.followed(at, "p/k", "oss://b/p/k", 403, {}, body)
        assert moved is not None
        assert moved.base_url == "https://b.oss-cn-beijing.aliyuncs.com"
        assert moved.region == "cn-beijing"
        assert redirects.followed(AWS, "p/k", "s3://b/p/k", 403, {}, body) is None
    for body in (
        named("AccessDenied"),
        named("AccessDenied", "<Endpoint>169.254.169.254</Endpoint>"),
    ):
        assert redirects.followed(at, "p/k", "oss://b/p/k", 403, {}, body) is None


@pytest.mark.parametrize("host", ["169.254.169.254", "127.0.0.1", "other.example.com"])
def test_the_endpoint_in_a_body_may_be_the_stores_own_only(host: str) -> None:
    """Who answers for the store may write anything there."""
    body = f"<Error><Code>TemporaryRedirect</Code><Endpoint>{host}</Endpoint></Error>".encode()
    for at in (AWS, OWN):
        with pytest.raises(OriginError, match="is not followed"):
            redirects.followed(at, "p/k", "s3://b/p/k", 307, {}, body)


def named(code: str, more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code>{more}</Error>".encode()


@pytest.mark.parametrize(
    ("at", "host"),
    [
        ("s3.us-east-1.amazonaws.com", "s3.eu-west-1.amazonaws.com"),
        ("s3-fips.us-east-1.amazonaws.com", "s3-fips.eu-west-1.amazonaws.com"),
        ("s3.dualstack.us-east-1.amazonaws.com", "s3.dualstack.eu-west-1.amazonaws.com"),
        ("s3.us-iso-east-1.c2s.ic.gov", "s3.eu-west-1.c2s.ic.gov"),
        ("s3.amazonaws.com", "s3.eu-west-1.amazonaws.com"),
        ("s3-accelerate.amazonaws.com", "s3-accelerate.amazonaws.com"),
        ("store.example.com", "store.example.com"),
    ],
)
@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (301, {"x-amz-bucket-region": "eu-west-1"}, b""),
        (400, {"x-amz-bucket-region": "eu-west-1"}, b""),
        (301, {"x-amz-bucket-region": "eu-west-1"}, named("PermanentRedirect")),
        (400, {}, named("AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>")),
        (403, {}, named("AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>")),
    ],
)
def test_a_region_that_is_named(
    at: str, host: str, status: int, headers: dict[str, str], body: bytes
) -> None:
    for style in ("https://b.{}", "https://{}/b"):
        place = target(f"https://{at}", style.format(at))
        moved = redirects.followed(place, "p/k", "s3://b/p/k", status, headers, body)
        assert moved is not None
        assert (moved.base_url, moved.region) == (style.format(host), "eu-west-1")
        assert redirects.followed(moved, "p/k", "s3://b/p/k", status, headers, body) is None


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (403, {"x-amz-bucket-region": "eu-west-1"}, named("AccessDenied")),
        (404, {"x-amz-bucket-region": "eu-west-1"}, b""),
        (400, {}, named("AuthorizationHeaderMalformed", "<Region>evil.com/x</Region>")),
        (400, {"x-amz-bucket-region": "a\x1bb"}, b""),
        (400, {}, named("AuthorizationHeaderMalformed", f"<Region>{'x' * 64}</Region>")),
        (400, {}, named("AuthorizationHeaderMalformed")),
        (500, {}, named("InternalError", "<Region>eu-west-1</Region>")),
    ],
)
def test_an_answer_that_names_no_other_region(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    assert redirects.followed(AWS, "p/k", "s3://b/p/k", status, headers, body) is None


def in_region(region: str, refused: list[Asked]) -> Callable[[Asked], Answer]:
    """A store that accepts signatures for this region only, and names it as MinIO does."""

    def answer(asked: Asked) -> Answer:
        if f"/{region}/s3/" not in asked.headers["authorization"]:
            refused.append(asked)
            more = f"<Region>{region}</Region>"
            if asked.method == "HEAD":
                return Answer(status=400, headers={"x-amz-bucket-region": region})
            return Answer(named("AuthorizationHeaderMalformed", more), 400)
        if asked.is_list:
            return page(row("f"))
        body = b"x" * LARGE.size_bytes if asked.path == "/b/large" else b"data"
        return Answer(body, headers=HEADERS)

    return answer


WAYS = ["list", "look up", "stat", "small", "large", "put", "put much"]


async def ask(origin: Origin, way: str) -> None:
    if way == "large":
        await origin.read("large", LARGE, 0, LARGE.size_bytes)
    elif way == "put much":
        assert origin.writer is not None
        await origin.writer.put("f", BufferContent(bytes(1 << 20)))
    else:
        await fails(origin, way)


@pytest.mark.parametrize("way", WAYS)
async def test_a_wrong_region_is_found_out(server: ToldS3, origin: Origin, way: str) -> None:
    refused: list[Asked] = []
    server.answer = in_region("eu-west-9", refused)
    await ask(origin, way)
    assert 1 <= len(refused) <= 2


async def test_after_the_check_all_requests_have_the_right_region(
    server: ToldS3, origin: Origin
) -> None:
    refused: list[Asked] = []
    server.answer = in_region("eu-west-9", refused)
    await origin.check()
    assert len(refused) == 1
    for way in WAYS:
        await ask(origin, way)
    assert await origin.read_many([("f", SMALL)], 1, lambda: False) != [None]
    assert len(refused) == 1
    assert "urllib3" not in str(server.asked)


async def test_a_region_that_is_never_right_is_named(server: ToldS3, origin: Origin) -> None:
    more = "<Region>eu-west-9</Region>"
    server.answer = lambda asked: Answer(named("AuthorizationHeaderMalformed", more), 400)
    with pytest.raises(OriginError, match="eu-west-9"):
        await origin.check()
    assert len(server.asked) == 2


async def test_a_write_is_sent_again_within_the_store(server: ToldS3, origin: Origin) -> None:
    seen: list[Asked] = []

    def answer(asked: Asked) -> Answer:
        seen.append(asked)
        if len(seen) == 1:
            return Answer(status=307, headers={"Location": f"{server.endpoint}/b/f"})
        return Answer(headers=HEADERS)

    server.answer = answer
    await fails(origin, "put")
    assert [asked.body for asked in seen] == [b"x", b"x"]
    assert [asked.headers["x-amz-security-token"] for asked in seen] == ["secret-token"] * 2


async def test_a_head_that_drips_ends(server: ToldS3) -> None:
    """Neither of a listing nor of an object; nobody gives up before."""

    async def drip(stream: trio.SocketStream) -> None:
        try:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\n")
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.05)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, drip, 0)
        port = listeners[0].socket.getsockname()[1]
        options = OriginOptions(endpoint=f"http://127.0.0.1:{port}", total_timeout_s=1)
        origin = open_origin("s3://b", options)
        for way in ("list", "stat", "large"):
            with trio.fail_after(120), pytest.raises(OriginUnavailableError):
                await fails(origin, way)
        await origin.aclose()
        nursery.cancel_scope.cancel()
