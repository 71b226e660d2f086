"""A web server's directories: names, redirects, and answers that are no files."""

import html
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

import pytest
import yarl

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.origin.base import Origin
from cachefs.origin.fsspec import http_tree
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.types import ObjectMeta
from tests.origin.listing import list_all
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3

ODD = ["a b", "%2e%2e", "q?x=1", "h#1", "50%", "é+", "x&y", "semi;colon", "%41"]
FILES = {f"/top dir/{name}": f"of {name}".encode() for name in ODD} | {
    "/top dir/sub/f": b"below",
    "/secret": b"secret",
    "/top dir/large": bytes(range(256)) * 8192,
}


class Web:
    """Serves `FILES` with index pages, sends those who ask for a directory to its slash, and those
    who ask for `FILES` below `/moved` to where they are."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def answer(self, asked: Asked) -> Answer:
        path = asked.path
        self.paths.append(path)
        if path.startswith("/moved/"):
            return Answer(status=302, headers={"Location": quote(path.removeprefix("/moved"))})
        if path in FILES and not asked.query:
            return self._file(FILES[path], asked)
        inside = [name for name in FILES if name.startswith(path.rstrip("/") + "/")]
        if not inside:
            return Answer(status=404)
        if not path.endswith("/"):
            return Answer(status=301, headers={"Location": quote(path) + "/"})
        parts = {name.removeprefix(path).partition("/")[::2] for name in inside}
        links = [quote(name) + ("/" if rest else "") for name, rest in sorted(parts)]
        links += ["?C=N;O=D", "../", "/secret"]
        page = "".join(f'<a href="{html.escape(link)}">link</a>' for link in links)
        return Answer(page.encode(), headers={"Content-Type": "text/html"})

    def _file(self, data: bytes, asked: Asked) -> Answer:
        headers = {"Last-Modified": DATE}
        if asked.method == "HEAD" or "range" not in asked.headers:
            return Answer(data, headers=headers)
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Answer(data[first : last + 1], 206, headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    with ToldS3(Web().answer) as told:
        yield told


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[Origin]:
    opened = open_origin(f"{server.endpoint}/top dir", OriginOptions())
    yield opened
    await opened.aclose()


async def test_names_go_out_and_come_in_as_they_are(origin: Origin) -> None:
    listed = await list_all(origin)
    assert sorted(listed) == sorted([*ODD, "sub", "large"])
    for name in ODD:
        meta = await origin.stat(name)
        assert isinstance(meta, ObjectMeta)
        assert listed[name].meta == meta
        data = bytes(await origin.read(name, meta, 0, meta.size_bytes))
        assert data == f"of {name}".encode()
    with pytest.raises(NotFoundError):
        await origin.stat("%2e%2e/secret")
    with pytest.raises(NotFoundError):
        await origin.stat("sub%2ff")


async def test_a_page_of_spaces_takes_no_time(server: ToldS3, origin: Origin) -> None:
    server.answer = lambda _: Answer(b"<a" + b" " * 100_000, headers={"Content-Type": "text/html"})
    assert await list_all(origin) == {}


async def test_links_are_found_as_browsers_find_them(server: ToldS3, origin: Origin) -> None:
    text = """<a href="../">..</a><A title="x>y" HREF = './a%20b'>a</A><a href="x&amp;y/">d</a>
        <a data-href="no"><a href=no><a href="https://elsewhere/no"><abbr href="no"><a
        href="c">"""
    headers = {"Content-Type": "text/html; charset=utf-8", "Last-Modified": DATE}
    server.answer = lambda _: Answer(text.encode(), headers=headers)
    assert sorted(await list_all(origin)) == ["a b", "c", "x&y"]
    assert origin.counters.unshown_keys == 0


async def test_directories_are_no_files(origin: Origin) -> None:
    assert await origin.stat("sub") is None
    assert list(await list_all(origin, "sub")) == ["f"]


async def test_redirects_are_followed(server: ToldS3) -> None:
    origin = open_origin(f"{server.endpoint}/moved/top dir", OriginOptions())
    for name, part in (("a b", 6), ("large", 1 << 20)):
        meta = await origin.stat(name)
        assert isinstance(meta, ObjectMeta)
        data = bytes(await origin.read(name, meta, 1, part - 1))
        assert data == FILES[f"/top dir/{name}"][1:part]
    await origin.aclose()


@pytest.mark.parametrize(
    ("asked", "status", "location", "is_left"),
    [
        ("https://h/a", 302, "http://h/a", True),
        ("https://h/a", 307, " HTTP://other/a", True),
        ("https://h/a", 301, "https://other/a", False),
        ("https://h/a", 301, "/b", False),
        ("https://h/a", 200, "http://h/a", False),
        ("http://h/a", 302, "http://other/a", False),
    ],
)
def test_what_leaves_tls(asked: str, status: int, location: str, is_left: bool) -> None:
    assert http_tree.leaves_tls(yarl.URL(asked), status, location) is is_left


@pytest.mark.expect_log("redirects to a host without TLS")
async def test_a_redirect_that_leaves_tls_is_an_error(
    server: ToldS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_tree, "leaves_tls", lambda _, status, __: status == 302)
    origin = open_origin(f"{server.endpoint}/moved/top dir", OriginOptions())
    with pytest.raises(OriginError, match="without TLS"):
        await origin.stat("a b")
    with pytest.raises(OriginError, match="without TLS"):
        await origin.read("a b", ObjectMeta(6, 0, "1"), 0, 6)
    await origin.aclose()


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/f", "{path}"])
async def test_redirects_that_lead_nowhere(server: ToldS3, origin: Origin, location: str) -> None:
    server.answer = lambda asked: Answer(
        status=302, headers={"Location": location.format(path=quote(asked.path))}
    )
    with pytest.raises(OriginError):
        await origin.stat("f")
    with pytest.raises(OriginError):
        await origin.read("f", ObjectMeta(6, 0, "1"), 0, 6)
    assert len(server.asked) < 100


@pytest.mark.parametrize("told", [None, "bytes 0-3/9", "bytes */9"])
async def test_a_part_must_say_that_it_is_the_right_one(
    server: ToldS3, origin: Origin, told: str | None
) -> None:
    def answer(asked: Asked) -> Answer:
        headers = {"Last-Modified": DATE, "ETag": '"v"'}
        if asked.method == "HEAD":
            return Answer(b"123456789", headers=headers)
        return Answer(b"1234", 206, headers | ({"Content-Range": told} if told else {}))

    server.answer = answer
    with pytest.raises(BadDataError, match="another part"):
        await origin.read("f", ObjectMeta(9, 0, '"v"'), 4, 4)


async def test_a_server_without_ranges_sends_the_whole_file(server: ToldS3, origin: Origin) -> None:
    server.answer = lambda _: Answer(b"123456789", headers={"Last-Modified": DATE, "ETag": '"v"'})
    assert bytes(await origin.read("f", ObjectMeta(9, 0, '"v"'), 4, 4)) == b"5678"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, NotFoundError),
        (403, AccessDeniedError),
        (503, OriginBusyError),
        (500, OriginUnavailableError),
    ],
)
async def test_a_failure_is_no_absence(
    server: ToldS3, origin: Origin, status: int, kind: type[OriginError]
) -> None:
    server.answer = lambda asked: Answer(status=status)
    with pytest.raises(kind):
        await origin.stat("f")


async def test_what_has_neither_etag_nor_time_is_no_file(server: ToldS3, origin: Origin) -> None:
    server.answer = lambda asked: Answer(b"a page", headers={"Content-Type": "text/html"})
    with pytest.raises(OriginError, match="neither an ETag nor a time"):
        await origin.stat("f")


async def test_an_endless_answer_is_not_read_to_its_end(
    server: ToldS3, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_tree, "MOST_BYTES", 1 << 20)

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 16)

    server.answer = lambda asked: Answer(endless(), headers={"Last-Modified": DATE})
    with pytest.raises(OriginError):
        await origin.read("f", ObjectMeta(4, 0, "v"), 0, 4)
    with pytest.raises(OriginError):
        await list_all(origin)
    assert server.sent_bytes < 64 << 20
