"""What the control socket says of the cache by path, and what it asks of the origin for that."""

from contextlib import aclosing
from typing import Any

import pytest
import trio

from cachefs.control.api import Handler
from cachefs.control.routes.cache import CacheRoutes
from cachefs.errors import CacheDirError, OriginUnavailableError, UsageError
from cachefs.namespace.namespace import ROOT_INO
from cachefs.types import BLOCK_BYTES
from tests.namespace.harness import Reading, ScriptedOrigin, Tree

DATA = b"0123456789" * 10


class Desk:
    """The routes, and what they told the kernel."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.entries: list[tuple[int, bytes]] = []
        self.attributes: list[int] = []
        self.dropped: list[tuple[int, bytes]] = []
        """Those of `entries` that the last answer waited for."""
        self.is_down = False
        self.routes = CacheRoutes(
            reading.tree.namespace,
            reading.cache,
            lambda parent, name: self.entries.append((parent, name)),
            self.attributes.append,
            self._names_dropped,
            lambda: self.is_down,
        )

    async def _names_dropped(self) -> None:
        await trio.lowlevel.checkpoint()
        self.dropped = list(self.entries)

    async def ask(self, handler: Handler, *paths: str, **arguments: Any) -> list[dict[str, Any]]:
        lines = handler({"paths": list(paths), **arguments})
        async with aclosing(lines):  # type: ignore[type-var]
            return [dict(line) async for line in lines]  # type: ignore[union-attr]

    async def read(self, *paths: str) -> None:
        """All of these files, so that they are cached."""
        namespace, cache = self.reading.tree.namespace, self.reading.cache
        for path in paths:
            ref = namespace.object_ref(await self.reading.tree.find(path))
            for index in range(ref.block_count):
                await cache.read_block(ref, index, 0, ref.block_length(index))
        await cache.drain()


@pytest.fixture
def desk(reading: Reading) -> Desk:
    origin = reading.tree.origin
    for path in ("a/1", "a/2", "b/c/3", "b/4", "top"):
        origin.put(path, DATA + path.encode())
    return Desk(reading)


async def listed(tree: Tree, *paths: str) -> None:
    for path in paths:
        ino = (await tree.find(path)).ino if path else 1
        await tree.namespace.open_directory(ino).wait_for_end()
    tree.origin.take_requests()


# -- usage and info ------------------------------------------------------------------------------


async def test_directories_are_listed_once_for_their_sums(
    desk: Desk, origin: ScriptedOrigin
) -> None:
    lines = await desk.ask(desk.routes.usage, "")
    assert [(line["path"], line["files"]) for line in lines] == [
        ("a", 2),
        ("b/c", 1),
        ("b", 2),
        ("", 5),
    ]
    assert lines[-1]["size_bytes"] == 5 * len(DATA) + len("a/1a/2b/c/3b/4top")
    assert sorted(origin.take_requests()) == [("list", path) for path in ("", "a", "b", "b/c")]
    await desk.read("a/1", "b/c/3")
    origin.take_requests()
    lines = await desk.ask(desk.routes.usage, "b", "a/1", depth=0)
    assert [(x["number"], x["path"], x["cached_files"], x["files"]) for x in lines] == [
        (0, "", 1, 2),
        (1, "", 1, 1),
    ]
    assert origin.take_requests() == []


async def test_a_directory_that_cant_be_listed_is_told_and_the_rest_counted(
    desk: Desk, origin: ScriptedOrigin
) -> None:
    await listed(desk.reading.tree, "", "a", "b")
    origin.down = OriginUnavailableError("it is away")
    lines = await desk.ask(desk.routes.usage, "", depth=0)
    assert lines[0] == {"number": 0, "path": "b/c", "failure": "it is away"}
    assert [(line["path"], line["files"]) for line in lines[1:]] == [("", 4)]
    (info,) = await desk.ask(desk.routes.info, "")
    assert info["problem"] == "b/c: it is away"
    lines = await desk.ask(desk.routes.pin, "a", "b")
    assert lines[0] == {"number": 1, "failure": "it is away"}
    assert lines[1]["files"] >= 3


@pytest.mark.long
async def test_large_directories_come_in_batches(desk: Desk, origin: ScriptedOrigin) -> None:
    for number in range(1000):
        origin.put(f"wide/{number}", b"x")
        origin.put(f"dirs/{number}/file", b"y")
    (line,) = await desk.ask(desk.routes.usage, "wide", depth=0)
    assert line["files"] == 1000
    (line,) = await desk.ask(desk.routes.usage, "dirs", depth=0)
    assert (line["files"], line["directories"]) == (1000, 1001)
    (sums,) = await desk.ask(desk.routes.evict, "")
    assert sums["files"] == 2000


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"paths": "a"},
        {"paths": [1]},
        {"paths": [""], "depth": -1},
        {"paths": [""], "depth": "x"},
    ],
)
async def test_wrong_arguments(desk: Desk, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        async for _ in desk.routes.usage(arguments):
            pass


async def test_paths_that_lead_out_are_refused(desk: Desk) -> None:
    for handler in desk.routes.handlers().values():
        lines = await desk.ask(handler, "a/../../b", "no\0such", "a/1/2", "nowhere")
        assert [line["number"] for line in lines if "failure" in line] == [0, 1, 2, 3]


# -- steering ------------------------------------------------------------------------------------


async def test_evict_asks_nothing(desk: Desk, origin: ScriptedOrigin) -> None:
    await desk.read("a/1", "b/c/3")
    origin.take_requests()
    (sums,) = await desk.ask(desk.routes.evict, "")
    assert (sums["files"], sums["blocks"], sums["pinned_blocks"]) == (2, 2, 0)
    assert origin.take_requests() == []


async def test_more_than_the_limit_is_not_pinned(desk: Desk, origin: ScriptedOrigin) -> None:
    tier = desk.reading.tier
    tier.pin_ratio = 1.5 * BLOCK_BYTES / tier.slabs.capacity_bytes
    for number in range(3):
        origin.put(f"large/{number}", bytes(BLOCK_BYTES))
    await desk.read("large/0", "large/1", "large/2")
    with pytest.raises(CacheDirError, match="nothing was pinned"):
        await desk.ask(desk.routes.pin, "large")
    assert desk.reading.cache.status()[0].pinned_bytes == 0
    (sums,) = await desk.ask(desk.routes.pin, "large/1")
    assert sums["pinned_bytes"] == sums["size_bytes"] == BLOCK_BYTES


# -- refreshing ----------------------------------------------------------------------------------


async def test_refresh_counts_and_tells_the_kernel(desk: Desk, origin: ScriptedOrigin) -> None:
    tree = desk.reading.tree
    await listed(tree, "", "a", "b", "b/c")
    await desk.read("a/1", "a/2", "b/c/3", "b/4")
    a, b = (await tree.find("a")).ino, (await tree.find("b")).ino
    origin.put("a/1", b"other")
    origin.delete("a/2")
    origin.put("a/new", b"new")
    origin.delete("b/c/3")
    origin.take_requests()
    (found,) = await desk.ask(desk.routes.refresh, "")
    assert (found["changed"], found["new"], found["gone"]) == (1, 1, 2)
    assert (found["dropped_blocks"], found["directories"]) == (3, 3)
    assert sorted(origin.take_requests()) == [("list", path) for path in ("", "a", "b")]
    assert sorted(tree.unbound) == [(a, b"1"), (a, b"2"), (b, b"c")]
    assert sorted(desk.entries) == [(a, b"1"), (a, b"new")]
    assert desk.dropped == desk.entries
    assert set(desk.attributes) == {ROOT_INO, a, b}
    desk.entries.clear()
    desk.attributes.clear()
    (found,) = await desk.ask(desk.routes.refresh, "", "a/1")
    assert (found["changed"], found["new"], found["gone"], found["dropped_blocks"]) == (0, 0, 0, 0)
    assert desk.entries == []
    assert set(desk.attributes) == {ROOT_INO, a, b}, "others may have found what it doesn't know"


async def test_refresh_asks_only_for_what_is_known(desk: Desk, origin: ScriptedOrigin) -> None:
    await desk.read("b/4")  # `a` and `b/c` are unknown, the root was never listed
    origin.take_requests()
    (found,) = await desk.ask(desk.routes.refresh, "b/4")
    assert (found["checked"], found["directories"]) == (1, 0)
    assert origin.take_requests() == [("stat", "b/4")]
    await desk.ask(desk.routes.refresh, "")
    assert ("list", "b/c") not in origin.take_requests()


async def test_a_version_that_comes_back_keeps_its_blocks(
    desk: Desk, origin: ScriptedOrigin
) -> None:
    await listed(desk.reading.tree, "", "a")
    await desk.read("a/1")
    inode = await desk.reading.tree.find("a/1")
    origin.delete("a/1")
    origin.put("a/1", DATA + b"a/1", version=inode.version)
    (found,) = await desk.ask(desk.routes.refresh, "a")
    assert found["dropped_blocks"] == 0
    (info,) = await desk.ask(desk.routes.info, "a/1")
    assert info["cached_bytes"] == info["size_bytes"]


async def test_refresh_while_the_origin_is_away(desk: Desk, origin: ScriptedOrigin) -> None:
    await listed(desk.reading.tree, "", "a")
    await desk.read("a/1")
    origin.down = OriginUnavailableError("it is away")
    lines = await desk.ask(desk.routes.refresh, "a", "a/1")
    assert [(x["number"], "it is away" in x["failure"]) for x in lines[:2]] == [
        (0, True),
        (1, True),
    ]
    assert (lines[2]["gone"], lines[2]["dropped_blocks"]) == (0, 0)
    found: list[dict[str, Any]] = []

    async def wait() -> None:
        found.extend(await desk.ask(desk.routes.refresh, "a", "a/1", wait=True))

    async with trio.open_nursery() as nursery:
        desk.is_down = True
        nursery.start_soon(wait)
        await trio.sleep(0.1)
        assert not found
        origin.put("a/1", b"other")
        origin.down = None
    assert [line["changed"] for line in found] == [1]


async def test_a_refresh_that_waits_gives_up_while_the_origin_is_up(
    desk: Desk, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One listing is always wrong, and the origin answers everything else."""
    monkeypatch.setattr("cachefs.control.routes.refresh._WAIT_S", 0.01)
    await listed(desk.reading.tree, "", "a")

    async def refuse(path: str, number: int) -> None:
        if path == "a":
            raise OriginUnavailableError("the listing is wrong, each time it was asked")

    origin.before_page = refuse
    with trio.fail_after(300):
        lines = await desk.ask(desk.routes.refresh, "a", wait=True)
    assert "the listing is wrong" in lines[0]["failure"]


async def test_failures_during_an_outage_do_not_count(
    desk: Desk, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them may be told when the outage has just ended."""
    monkeypatch.setattr("cachefs.control.routes.refresh._WAIT_S", 0.01)
    await listed(desk.reading.tree, "", "a")
    origin.put("a/1", b"other")
    desk.is_down = True
    tries = 0

    async def refuse(path: str, number: int) -> None:
        nonlocal tries
        if path == "a":
            tries += 1
            desk.is_down = tries < 10
            if tries < 12:
                raise OriginUnavailableError("it is away")

    origin.before_page = refuse
    with trio.fail_after(300):
        (line,) = await desk.ask(desk.routes.refresh, "a", wait=True)
    assert line["changed"] == 1
    assert tries >= 12


async def test_a_refresh_that_is_broken_off_leaves_nothing_behind(
    desk: Desk, origin: ScriptedOrigin
) -> None:
    await listed(desk.reading.tree, "", "a")

    async def dawdle(path: str, number: int) -> None:
        await trio.sleep_forever()

    table = desk.reading.tree.namespace.table
    before = list(table.on_unnamed)
    origin.before_page = dawdle
    with trio.move_on_after(0.1):
        await desk.ask(desk.routes.refresh, "a")
    origin.before_page = None
    assert table.on_unnamed == before
