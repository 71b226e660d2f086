"""Policies that allow less than everything: what a mount needs to read (ORIGINS, "Permissions")."""

from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import quote

import pytest

from cachefs.errors import AccessDeniedError, BadDataError, NotEmptyError, NotFoundError, UsageError
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.writable import BufferContent
from cachefs.types import Entry, ObjectMeta
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

KEYS = ["home/me/a", "home/me/d/b", "home/me/d/e/c", "home/other/x", "pub"]
DENIED = Answer(b"<Error><Code>AccessDenied</Code></Error>", 403)


def user_folder(asked: Asked) -> bool:
    """The policy that AWS documents for folders of users."""
    if not asked.is_list:
        return asked.path.startswith("/b/home/me/")
    prefix = asked.query.get("prefix", "")
    return prefix.startswith("home/me/") or (
        prefix in ("", "home/") and asked.query.get("delimiter") == "/"
    )


def only_delimited(asked: Asked) -> bool:
    return not asked.is_list or asked.query.get("delimiter") == "/"


class Store:
    def __init__(self) -> None:
        self.allows: Callable[[Asked], bool] = user_folder
        self.denied = 0
        self.written: list[str] = []

    def answer(self, asked: Asked) -> Answer:
        if not self.allows(asked):
            self.denied += 1
            return DENIED
        if asked.is_list:
            return self._page(asked.query.get("prefix", ""), asked.query.get("delimiter", ""))
        if asked.method == "PUT":
            self.written.append(asked.path)
            return Answer(headers={"ETag": '"one"'})
        if asked.path.removeprefix("/b/") in KEYS:
            return Answer(b"data", headers={"ETag": '"one"', "Last-Modified": DATE})
        # S3 tells nobody what is absent who may not list the whole bucket.
        return DENIED

    def _page(self, prefix: str, delimiter: str) -> Answer:
        found, prefixes = [], dict[str, None]()
        for key in KEYS:
            if key.startswith(prefix):
                rest = key.removeprefix(prefix)
                if delimiter and delimiter in rest:
                    prefixes[prefix + rest.partition(delimiter)[0] + delimiter] = None
                else:
                    found.append(row(quote(key)))
        more = "".join(f"<CommonPrefixes><Prefix>{p}</Prefix></CommonPrefixes>" for p in prefixes)
        return page(*found, more=more)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with ToldS3(store.answer) as told:
        yield told


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[Origin]:
    opened = open_origin("s3://b", OriginOptions(endpoint=server.endpoint))
    yield opened
    await opened.aclose()


async def names(origin: Origin, path: str) -> list[str]:
    below: dict[str, list[Entry]] = {}
    found = [name async for entries in origin.list_dir(path, below) for name, _ in entries]
    return sorted(found)


async def test_a_folder_of_a_user(origin: Origin) -> None:
    await origin.check()
    assert await names(origin, "") == ["home", "pub"]
    assert await names(origin, "home") == ["me", "other"]
    assert await names(origin, "home/me") == ["a", "d"]
    assert await names(origin, "home/me/d") == ["b", "e"]
    for path in ("home", "home/me", "home/me/d"):
        assert await origin.stat(path) is None
        assert (await origin.stat_and_read(path))[0] is None
    assert isinstance(await origin.stat("home/me/a"), ObjectMeta)
    with pytest.raises(AccessDeniedError):
        await names(origin, "home/other")


async def test_what_is_absent_is_told_apart_from_what_is_denied(origin: Origin) -> None:
    for path in ("home/me/new", "home/me/d/new/deep"):
        for ask in (origin.stat, origin.stat_and_read):
            with pytest.raises(NotFoundError):
                await ask(path)
    for path in ("home/other/x", "pub", "new"):
        with pytest.raises(AccessDeniedError):
            await origin.stat(path)
    with pytest.raises(NotFoundError):
        await names(origin, "home/me/new")


async def test_a_prefix_below_what_may_be_listed(server: ToldS3, store: Store) -> None:
    store.allows = lambda asked: (
        asked.query.get("prefix", "").startswith("home/me/") if asked.is_list else True
    )
    origin = open_origin("s3://b/home/me", OriginOptions(endpoint=server.endpoint))
    await origin.check()
    assert await names(origin, "") == ["a", "d"]
    assert not store.denied
    await origin.aclose()


async def test_only_lists_with_a_delimiter(origin: Origin, store: Store) -> None:
    store.allows = only_delimited
    for path, expected in [("", ["home", "pub"]), ("home", ["me", "other"])] * 3:
        assert await names(origin, path) == expected
    assert store.denied == 2, "each directory was tried once without a delimiter"
    for path in ("home/me", "home/me/d", "home/me/d/e", "home/other"):
        await names(origin, path)
    assert store.denied == 3, "after three denials none is sent"


async def test_only_siblings_are_denied(origin: Origin, store: Store) -> None:
    """Of every eighth directory the first LIST would also cover those that follow it."""
    for _ in range(16):
        assert await names(origin, "home/me") == ["a", "d"]
    assert 0 < store.denied <= 3


async def test_writers_need_no_other_form(origin: Origin, store: Store) -> None:
    assert origin.writer is not None
    store.allows = only_delimited
    with pytest.raises(NotEmptyError):
        await origin.writer.remove_directory("home")
    assert not store.denied


async def test_a_directory_is_made_where_the_head_of_what_is_absent_is_denied(
    origin: Origin, store: Store
) -> None:
    assert origin.writer is not None
    await origin.writer.make_directory("home/me/new")
    await origin.writer.make_directory("home/me/new", is_new=True, write_id="1")
    assert store.written == ["/b/home/me/new/"] * 2
    with pytest.raises(AccessDeniedError):
        await origin.writer.make_directory("home/other/new")


async def test_the_requester_pays(server: ToldS3, store: Store) -> None:
    store.allows = lambda asked: (
        asked.headers.get("x-amz-request-payer") == "requester"
        and "x-amz-request-payer" in asked.headers["authorization"]
    )
    options = OriginOptions(endpoint=server.endpoint, requester_pays=True)
    origin = open_origin("s3://b", options)
    await origin.check()
    assert await names(origin, "home/me") == ["a", "d"]
    small, large = ObjectMeta(4, 1, '"one"'), ObjectMeta(1 << 20, 1, '"one"')
    await origin.stat("home/me/a")
    await origin.stat_and_read("home/me/a")
    await origin.read("home/me/a", small, 0, 4)
    await origin.read_many([("home/me/a", small)], 1, lambda: False)
    with pytest.raises(BadDataError):  # it has another size
        await origin.read("home/me/a", large, 0, large.size_bytes)
    assert origin.writer is not None
    for size_bytes in (1, 1 << 20):
        await origin.writer.put("new", BufferContent(bytes(size_bytes)))
    assert not store.denied
    await origin.aclose()


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("oss://b", {}, "is for s3://"),
        ("file:///tmp", {}, "is for s3://"),
        ("s3://b", {"anonymous": True}, "contradict"),
    ],
)
def test_what_does_not_go_with_requester_pays(
    url: str, options: dict[str, bool], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        open_origin(url, OriginOptions(requester_pays=True, **options))  # type: ignore[arg-type]
