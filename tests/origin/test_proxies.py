"""Proxies: one decision for all requests to a source (origin/proxies.py)."""

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from cachefs.errors import OriginError, UsageError
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.proxies import Proxy, proxy_for
from cachefs.origin.writable import BufferContent
from cachefs.types import ObjectMeta
from tests.origin.listing import list_all
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
SMALL = ObjectMeta(4, 1_793_613_600_000_000_000, '"one"')
LARGE = ObjectMeta(3 << 20, 1_793_613_600_000_000_000, '"one"')
PROXY = "http://user:hunter2@proxy.example.com:3128"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_asked_directly"),
    [
        ("10.0.0.0/8", "http://10.1.2.3:9000", True),
        ("10.0.0.0/8", "http://11.1.2.3:9000", False),
        ("10.0.0.0/8", "http://ten.example.com", False),
        ("fd00::/8", "http://[fd00::1]:9000", True),
        ("[fd00::1]:9000", "http://[fd00::1]:9000", True),
        ("[fd00::1]:9000", "http://[fd00::1]:9001", False),
        ("::1", "http://[0:0:0:0:0:0:0:1]", True),
        ("127.0.0.1", "http://[::ffff:127.0.0.1]", True),
        ("192.168.1.1/24", "http://192.168.1.77", True),
        (".svc,.cluster.local", "http://minio.store.svc", True),
        (".svc,.cluster.local", "http://minio.store.svc.cluster.local:9000", True),
        ("*.svc", "http://minio.store.svc", True),
        ("example.com", "http://store.example.com", True),
        ("example.com", "http://example.com.", True),
        ("example.com", "http://badexample.com", False),
        ("EXAMPLE.com", "http://store.Example.COM", True),
        ("example.com:9000", "http://store.example.com:9000", True),
        ("example.com:9000", "http://store.example.com", False),
        ("example.com:443", "https://store.example.com", True),
        (" a.org , example.com b.org", "http://example.com", True),
        ("*", "http://example.com", True),
        ("", "http://example.com", False),
        (",.,", "http://example.com", False),
        ("amazonaws.com", "https://b.s3.eu-west-1.amazonaws.com", True),
    ],
)
def test_no_proxy(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, url: str, is_asked_directly: bool
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_for(url) is None) is is_asked_directly


@pytest.mark.parametrize(
    ("variables", "url", "address"),
    [
        ({"http_proxy": "p:1"}, "http://s", "http://p:1"),
        ({"http_proxy": "p:1"}, "https://s", None),
        ({"HTTPS_PROXY": "http://p:1/"}, "https://s", "http://p:1"),
        ({"https_proxy": "https://p"}, "https://s", "https://p:443"),
        ({"https_proxy": "p:1"}, "http://s", None),
        ({"ALL_PROXY": "http://p:1"}, "http://s", "http://p:1"),
        ({"all_proxy": "http://p:1", "http_proxy": "http://q:2"}, "http://s", "http://q:2"),
        ({"http_proxy": "p:1", "HTTP_PROXY": "q:2"}, "http://s", "http://p:1"),
        ({"http_proxy": "", "HTTP_PROXY": "q:2"}, "http://s", None),
        ({"http_proxy": "http://[::1]:3128"}, "http://s", "http://[::1]:3128"),
        ({"no_proxy": "s"}, "http://s", None),
    ],
)
def test_which_variable_counts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, address: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy_for(url)
    assert (found and found.address) == address


def test_a_password_is_for_the_proxy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://us%40er:hunter%2F2@proxy:3128")
    found = proxy_for("http://s")
    assert found == Proxy("http://proxy:3128", "us@er", "hunter/2")
    assert found.url == "http://us%40er:hunter%2F2@proxy:3128"
    assert found.authorization == "Basic dXNAZXI6aHVudGVyLzI="
    assert "hunter" not in repr(found)


@pytest.mark.parametrize("value", ["socks5://u:hunter2@p:1", "http://:1", "http://p:x", "//p"])
@pytest.mark.parametrize("source", ["s3://b", "http://store.example.com/d"])
def test_a_proxy_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, source: str, value: str
) -> None:
    monkeypatch.setenv("all_proxy", value)
    with pytest.raises(UsageError, match="all_proxy names no proxy") as caught:
        open_origin(source, OriginOptions(endpoint="http://store.example.com"))
    assert "hunter2" not in str(caught.value)


def answer(asked: Asked) -> Answer:
    """An S3 server with the objects `small` and `large`, a web server and a NameNode."""
    if asked.path.startswith("/webhdfs"):
        status = {"type": "FILE", "length": 4, "modificationTime": 1, "fileId": 1, "owner": "root"}
        status |= {"group": "root", "permission": "644", "pathSuffix": ""}
        return Answer(json.dumps({"FileStatus": status}).encode())
    if asked.is_list:
        return page(row("small"), row("large", 3 << 20))
    if asked.path.endswith("/"):
        return Answer(b'<a href="small">s</a>', headers={"Content-Type": "text/html"})
    headers = {"Last-Modified": DATE, "ETag": '"one"'}
    size = LARGE.size_bytes if asked.path.endswith("large") else 4
    if "range" in asked.headers:
        headers["Content-Range"] = f"bytes 0-3/{size}"
        return Answer(b"xxxx", 206, headers)
    return Answer(b"x" * size, headers=headers)


@pytest.fixture
def proxy() -> Iterator[ToldS3]:
    with ToldS3(answer) as told:
        yield told


@pytest.fixture
def store() -> Iterator[ToldS3]:
    with ToldS3(answer) as told:
        yield told


async def ask_all(origin: Origin) -> None:
    """Send each kind of request that an origin of S3 has."""
    await origin.check()
    await list_all(origin)
    await origin.stat("small")
    await origin.stat_and_read("small")
    await origin.read("small", SMALL, 0, 4)
    await origin.read("large", LARGE, 0, LARGE.size_bytes)
    if origin.reads_many:
        await origin.read_many([("small", SMALL)], 1, lambda: False)
    assert origin.writer is not None
    await origin.writer.put("small", BufferContent(b"x"))


@pytest.fixture
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[list[Origin]]:
    found: list[Origin] = []
    yield found
    for origin in found:
        await origin.aclose()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
async def test_all_requests_go_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, proxy: ToldS3, opened: list[Origin], name: str
) -> None:
    monkeypatch.setenv(name, proxy.endpoint.replace("http://", "http://user:hunter2@"))
    opened.append(open_origin("s3://b", OriginOptions(endpoint="http://store.invalid")))
    await ask_all(opened[0])
    assert {asked.method for asked in proxy.asked} == {"GET", "HEAD", "PUT"}
    assert len(proxy.asked) >= 7
    assert {asked.headers["proxy-authorization"] for asked in proxy.asked} == {
        "Basic dXNlcjpodW50ZXIy"
    }


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": "PROXY", "no_proxy": "10.0.0.0/8,127.0.0.0/8,.svc"},
        {"ALL_PROXY": "PROXY", "NO_PROXY": "127.0.0.1"},
        {"no_proxy": "localhost"},
        {"https_proxy": "PROXY"},
    ],
)
async def test_no_request_goes_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
    proxy: ToldS3,
    store: ToldS3,
    opened: list[Origin],
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("PROXY", proxy.endpoint))
    opened.append(open_origin("s3://b", OriginOptions(endpoint=store.endpoint)))
    await ask_all(opened[0])
    assert not proxy.asked
    assert "urllib3" not in str([asked.headers for asked in store.asked])


async def test_a_proxy_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, opened: list[Origin]
) -> None:
    monkeypatch.setenv("http_proxy", "http://user:hunter2@127.0.0.1:1")
    opened.append(open_origin("s3://b", OriginOptions(endpoint="http://store.invalid")))
    said = r"store\.invalid does not answer through the proxy http://127\.0\.0\.1:1$"
    with pytest.raises(OriginError, match=said):
        await opened[0].check()


@pytest.mark.parametrize("source", ["http://web.invalid/d", "webhdfs://namenode.invalid:9870/d"])
async def test_other_sources_over_http(
    monkeypatch: pytest.MonkeyPatch, proxy: ToldS3, opened: list[Origin], source: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy.endpoint.replace("http://", "http://user:hunter2@"))
    opened.append(open_origin(source))
    assert isinstance(await opened[0].stat("small"), ObjectMeta)
    assert proxy.asked[0].headers["proxy-authorization"] == "Basic dXNlcjpodW50ZXIy"
    before = len(proxy.asked)
    monkeypatch.setenv("NO_PROXY", ".invalid")
    with pytest.raises(OriginError) as caught:
        await opened[0].stat("small")
    assert len(proxy.asked) == before
    assert "hunter2" not in str(caught.value)
