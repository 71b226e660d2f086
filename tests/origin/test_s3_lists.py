"""Listings that lie: what is shown is right or an error, and nothing goes on for ever."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest
import trio

from cachefs.errors import (
    BadDataError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.origin.s3 import pages as s3_pages
from cachefs.origin.s3.lister import PAGE_BYTES
from cachefs.types import ObjectMeta
from tests.origin.listing import list_all
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row, token

TRUNCATED = "<IsTruncated>true</IsTruncated>"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    with ToldS3(lambda asked: page()) as told:
        yield told


def opened(server: ToldS3, total_timeout_s: float = 120) -> Origin:
    options = OriginOptions(
        endpoint=server.endpoint,
        anonymous=True,
        connect_timeout_s=60,
        idle_timeout_s=60,
        total_timeout_s=total_timeout_s,
    )
    return open_origin("s3://b", options)


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[Origin]:
    origin = opened(server)
    yield origin
    await origin.aclose()


async def names(origin: Origin, path: str = "", seeks_below: bool = False) -> list[str]:
    below = {} if seeks_below else None
    return [entry.name async for found in origin.list_dir(path, below) for entry in found]


def old_store(keys: list[str], page_keys: int, says_where: bool) -> Callable[[Asked], Answer]:
    """A store that knows ListObjects of the first version."""

    def answer(asked: Asked) -> Answer:
        start, after = asked.query.get("prefix", ""), asked.query.get("marker", "")
        rows: dict[str, str] = {}
        is_cut = False
        for key in keys:
            rest = key[len(start) :]
            group = start + rest.partition("/")[0] + "/" if "/" in rest else ""
            shown = group if group and "delimiter" in asked.query else key
            if not key.startswith(start) or shown <= after or shown in rows:
                continue
            if len(rows) == page_keys:
                is_cut = True
                break
            rows[shown] = (
                f"<CommonPrefixes><Prefix>{shown}</Prefix></CommonPrefixes>"
                if shown == group
                else row(key)
            )
        more = TRUNCATED if is_cut else "<IsTruncated>false</IsTruncated>"
        if is_cut and says_where:
            more += f"<NextMarker>{list(rows)[-1]}</NextMarker>"
        return page(*rows.values(), more=more)

    return answer


@pytest.mark.parametrize("says_where", [True, False])
@pytest.mark.parametrize("seeks_below", [True, False])
async def test_a_store_without_tokens_is_listed_to_its_end(
    server: ToldS3, origin: Origin, says_where: bool, seeks_below: bool
) -> None:
    keys = ["a", "b/1", "b/2", "b/3", "b/4", "c", "d/1", "d/e/1", "f", "g"]
    server.answer = old_store(keys, 2, says_where)
    assert await names(origin, "", seeks_below) == ["a", "b", "c", "d", "f", "g"]
    assert await names(origin, "b", seeks_below) == ["1", "2", "3", "4"]
    assert await names(origin, "d", seeks_below) == ["1", "e"]
    await heads_find_nothing(server)
    with pytest.raises(NotFoundError):
        await names(origin, "x", seeks_below)


async def heads_find_nothing(server: ToldS3) -> None:
    """From now on."""
    answer = server.answer
    server.answer = lambda asked: answer(asked) if asked.is_list else Answer(status=404)
    await trio.lowlevel.checkpoint()


async def test_a_page_that_failed_is_asked_for_again(server: ToldS3, origin: Origin) -> None:
    """And not the first one, also at the root of a bucket."""

    def answer(asked: Asked) -> Answer:
        place = asked.query.get("continuation-token", "")
        if place and server.lists() == 2:
            return Answer(status=500)
        return page(row("b")) if place else page(row("a"), more=token("1"))

    server.answer = answer
    assert await names(ResilientOrigin(origin, Resilience())) == ["a", "b"]
    assert server.lists() == 3


async def test_more_without_a_place_to_go_on_from_is_an_error(
    server: ToldS3, origin: Origin
) -> None:
    server.answer = lambda asked: page(more=TRUNCATED)
    with pytest.raises(BadDataError, match="not from where on"):
        await names(origin)


async def test_references_in_keys(server: ToldS3, origin: Origin) -> None:
    """None is dropped: `e&#27;` is another key than `e`."""
    keys = ["a&amp;b", "c&#233;", "d&#xe9;", "e&#27;", "e", "f&eacute;", "g&#x110000;", "h&#55296;"]
    server.answer = lambda asked: page(*(row(key) for key in keys))
    assert await names(origin) == ["a&b", "cé", "dé", "e", "f&eacute;", "g&#x110000;", "h&#55296;"]
    assert origin.counters.unshown_keys == 1


@pytest.mark.parametrize("seeks_below", [True, False])
async def test_a_page_without_a_key_is_not_the_end(
    server: ToldS3, origin: Origin, seeks_below: bool
) -> None:
    def answer(asked: Asked) -> Answer:
        place = int(asked.query.get("continuation-token", "0"))
        return page(more=token(str(place + 1))) if place < 5 else page(row("d/f"))

    server.answer = answer
    assert await names(origin, "d", seeks_below) == ["f"]
    await heads_find_nothing(server)
    assert await origin.stat("d") is None


async def test_pages_without_a_key_end_some_day(
    server: ToldS3, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_pages, "EMPTY_PAGES", 10)
    server.answer = lambda asked: page(
        more=token(str(1 + int(asked.query.get("continuation-token", "0"))))
    )
    with pytest.raises(BadDataError, match="pages without a key"):
        await names(origin)
    assert server.lists() < 15


@pytest.mark.parametrize("circle", [1, 3])
async def test_a_listing_that_goes_round_in_a_circle_is_an_error(
    server: ToldS3, origin: Origin, circle: int
) -> None:
    def answer(asked: Asked) -> Answer:
        place = int(asked.query.get("continuation-token", "0"))
        return page(row(f"f{place}"), more=token(str(place % circle + 1)))

    server.answer = answer
    with pytest.raises(BadDataError, match="circle"):
        await names(origin)
    assert server.lists() < 10


async def test_a_token_after_the_end_is_left_alone(server: ToldS3, origin: Origin) -> None:
    more = token("1").replace("true", "false")
    server.answer = lambda asked: page(row("f"), more=more)
    assert await names(origin) == ["f"]
    assert server.lists() == 1


async def test_a_key_that_comes_twice_is_one_name(server: ToldS3, origin: Origin) -> None:
    def answer(asked: Asked) -> Answer:
        if "continuation-token" not in asked.query:
            more = token("1") + "<CommonPrefixes><Prefix>d/</Prefix></CommonPrefixes>"
            return page(row("a", 0), row("a", 0), row("b"), row("b", 5), more=more)
        return page(row("e"), more="<CommonPrefixes><Prefix>d/</Prefix></CommonPrefixes>")

    server.answer = answer
    listed = await list_all(origin)
    assert list(listed) == ["a", "b", "d", "e"]
    meta = listed["b"].meta
    assert isinstance(meta, ObjectMeta)
    assert meta.size_bytes == 4


@pytest.mark.parametrize(
    ("odd", "is_shown"),
    [
        (row("odd", -5), False),
        (row("odd", 1 << 63), False),
        (row("odd", time="9999-12-31T23:59:59Z"), True),
        (row("odd", time="0001-01-01T00:00:00Z"), True),
        (row("odd", time=""), True),
        (row("odd", e_tag=""), True),
    ],
)
async def test_one_odd_object_costs_no_directory(
    server: ToldS3, origin: Origin, odd: str, is_shown: bool
) -> None:
    server.answer = lambda asked: page(row("a"), odd, row("z"))
    listed = await list_all(origin)
    assert sorted(listed) == (["a", "odd", "z"] if is_shown else ["a", "z"])
    assert origin.counters.unshown_keys == (not is_shown)
    for entry in listed.values():
        assert isinstance(entry.meta, ObjectMeta)
        assert abs(entry.meta.mtime_ns) < 1 << 63


async def test_an_object_without_etag_and_time_is_not_shown(server: ToldS3, origin: Origin) -> None:
    server.answer = lambda asked: page(row("a"), row("odd", time="", e_tag=""))
    assert await names(origin) == ["a"]
    assert origin.counters.unshown_keys == 1
    server.answer = lambda asked: Answer(b"data")
    with pytest.raises(BadDataError, match="neither an ETag nor a time"):
        await origin.stat("f")
    meta = ObjectMeta(4, 0, "0-4")
    with pytest.raises(BadDataError, match="neither an ETag nor a time"):
        await origin.read("f", meta, 0, 4)
    server.answer = lambda asked: Answer(b"data", headers={"Last-Modified": DATE})
    assert (await origin.stat("f")) is not None


def endless(piece: bytes, pause_s: float = 0) -> Iterator[bytes]:
    yield b"<ListBucketResult>"
    while True:
        yield piece
        time.sleep(pause_s)


async def fails_within(origin: Origin, limit_s: float, kind: type[OriginError]) -> None:
    began_at = time.monotonic()
    with pytest.raises(kind):
        await names(origin)
    assert time.monotonic() - began_at < limit_s


async def test_an_endless_listing_costs_no_memory(server: ToldS3, origin: Origin) -> None:
    piece = row("f").encode() * 1000
    server.answer = lambda asked: Answer(endless(piece))
    await fails_within(origin, 120, BadDataError)
    assert server.sent_bytes < 3 * PAGE_BYTES


@pytest.mark.long
async def test_a_listing_that_trickles_holds_no_thread(server: ToldS3) -> None:
    origin = opened(server, total_timeout_s=2)
    server.answer = lambda asked: Answer(endless(b" ", 0.05))
    await fails_within(origin, 60, OriginUnavailableError)
    await origin.aclose()


@pytest.mark.parametrize(
    "body",
    [b"<a/>" * 2_000_000, b"<Contents/>" * 200_000, b"<x a='" + b"<" * 1_000_000],
    ids=["tags", "rows", "garbage"],
)
async def test_a_page_that_would_take_much_memory_is_refused(
    server: ToldS3, origin: Origin, body: bytes
) -> None:
    server.answer = lambda asked: Answer(b"<ListBucketResult>" + body + b"</ListBucketResult>")
    await fails_within(origin, 120, BadDataError)


async def test_a_listing_goes_on_after_a_key_that_is_no_utf8(server: ToldS3) -> None:
    head = page(row("a"), more=TRUNCATED).body
    assert isinstance(head, bytes)
    odd = head.replace(b"<Key>a<", b"<Key>\xff<")
    server.answer = lambda asked: page(row("z")) if asked.query.get("marker") else Answer(odd)
    origin = opened(server)
    assert list(await list_all(origin)) == ["z"]
    await origin.aclose()


def _object_store(list_tag: str, head_tag: str) -> Callable[[Asked], Answer]:
    """Objects `d/f0`, ... whose ETag is another one in a listing than elsewhere."""

    def answer(asked: Asked) -> Answer:
        if asked.is_list:
            keys = [key for key in KEYS if key.startswith(asked.query.get("prefix", ""))]
            most = int(asked.query["max-keys"])
            return page(*(row(key, e_tag=list_tag) for key in keys[:most]))
        if asked.headers.get("if-match", head_tag) != head_tag:
            return Answer(status=412)
        found = {"Last-Modified": DATE, "ETag": head_tag}
        return Answer(b"data", headers=found if head_tag else {"Last-Modified": DATE})

    return answer


KEYS = [f"d/f{number}" for number in range(4)]


async def metas(origin: Origin) -> dict[str, ObjectMeta]:
    listed = await list_all(origin, "d")
    return {name: entry.meta for name, entry in listed.items()}


@pytest.mark.parametrize("list_tag", ["", '"other"', '"d41d8cd98f00b204e9800998ecf8427e"'])
async def test_e_tags_of_listings_that_are_others_than_those_of_objects(
    server: ToldS3, origin: Origin, list_tag: str
) -> None:
    server.answer = _object_store(list_tag, '"one"')
    listed = await metas(origin)
    for name, meta in listed.items():
        assert bytes(await origin.read(f"d/{name}", meta, 0, 4)) == b"data"
    looked_up = {name: await origin.stat(f"d/{name}") for name in listed}
    assert looked_up == await metas(origin)
    assert origin.learned is not None
    assert origin.learned.words == {"versions-by-time"}
    later = replace(looked_up["f0"], mtime_ns=0, version="0-4")
    with pytest.raises(ObjectChangedError):
        await origin.read("d/f0", later, 0, 4)


async def test_an_object_that_was_replaced_is_no_sign_of_two_e_tags(
    server: ToldS3, origin: Origin
) -> None:
    server.answer = _object_store('"one"', '"one"')
    listed = await metas(origin)
    server.answer = _object_store('"two"', '"two"')  # in the same second, with the same size
    with pytest.raises(ObjectChangedError):
        await origin.read("d/f0", listed["f0"], 0, 4)
    assert origin.learned is not None
    assert not origin.learned.words
