"""Names that exist and that no listing shows, such as .snapshot in HDFS: only a look-up finds that
they are absent, and they are in no listing."""

import re
from dataclasses import replace

import pytest
import trio.testing

from cachefs.errors import NotFoundError, OriginUnavailableError
from cachefs.namespace.namespace import ROOT_INO
from cachefs.origin.names import Pages
from cachefs.types import Entry
from tests.namespace.harness import TTLS, ScriptedOrigin, Tree, WallClock

HIDDEN = ".snapshot"


class HidingOrigin(ScriptedOrigin):
    may_hide = re.compile(rb"\..*")

    def __init__(self) -> None:
        super().__init__(page_size=10)
        self.hidden = {HIDDEN}

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        pages = super().list_dir(path, below)

        async def next_page() -> list[Entry] | None:
            page = await anext(pages, None)
            return page and [entry for entry in page if entry.name not in self.hidden]

        return Pages(next_page)


@pytest.fixture
def origin() -> HidingOrigin:
    origin = HidingOrigin()
    for path in ("a", ".b", f"{HIDDEN}/s1/a", "d/a", f"d/{HIDDEN}/s1/a"):
        origin.put(path, b"x")
    return origin


SHOWN = [".b", "a", "d"]


@pytest.mark.parametrize("first", ["look-up", "listing"])
async def test_a_hidden_name_can_be_entered_and_is_not_listed(
    tree: Tree, origin: HidingOrigin, clock: WallClock, first: str
) -> None:
    inos = set()
    for _ in range(3):
        for _ in range(2):
            if first == "look-up":
                inos.add((await tree.find(f"{HIDDEN}/s1/a")).ino)
            assert sorted(await tree.names()) == SHOWN
            inos.add((await tree.find(f"{HIDDEN}/s1/a")).ino)
            assert sorted(await tree.names((await tree.find("d")).ino)) == ["a"]
            inos.add((await tree.find(f"d/{HIDDEN}")).ino)
            assert await tree.names((await tree.find(HIDDEN)).ino) == ["s1"]
            clock.advance(101)
        await trio.testing.wait_all_tasks_blocked()  # a listing in the background
        await tree.restart(TTLS)
        mtime_ns = tree.mtime_ns()
    assert len(inos) == 2
    assert tree.mtime_ns() == mtime_ns, "to find such a name is no change of the directory"


async def test_the_names_from_a_listing_stay_in_a_reading_from_the_table(
    tree: Tree, origin: HidingOrigin, clock: WallClock
) -> None:
    await tree.find(HIDDEN)
    await tree.find(".b")
    assert sorted(await tree.names()) == SHOWN
    await tree.restart(TTLS)
    assert sorted(await tree.names()) == SHOWN
    clock.advance(200)
    origin.hidden.clear()
    assert sorted(await tree.names()) == [".b", HIDDEN, "a", "d"]
    await tree.restart(TTLS)
    assert sorted(await tree.names()) == [".b", HIDDEN, "a", "d"]


async def test_absence_is_from_look_ups_only(
    tree: Tree, origin: HidingOrigin, clock: WallClock
) -> None:
    await tree.names()
    origin.take_requests()
    for _ in range(2):
        for name in (".none", "none"):
            with pytest.raises(NotFoundError):
                await tree.find(name)
    assert origin.take_requests() == [("stat", ".none")]
    clock.advance(TTLS.negative_s + 1)
    origin.put(".none/x", b"x")
    origin.hidden.add(".none")
    assert (await tree.find(".none")).is_dir
    assert sorted(await tree.names()) == SHOWN
    origin.delete_tree(".none")
    clock.advance(50)
    await tree.namespace.listed_since(ROOT_INO, clock.now_ns())
    clock.advance(51)
    with pytest.raises(NotFoundError):
        await tree.find(".none")


async def test_a_listed_name_goes_with_the_listing(
    tree: Tree, origin: HidingOrigin, clock: WallClock
) -> None:
    await tree.names()
    origin.delete(".b")
    clock.advance(101)
    assert sorted(await tree.names()) == ["a", "d"]
    with pytest.raises(NotFoundError):
        await tree.find(".b")


@pytest.mark.expect_log("the origin does not answer")
async def test_in_an_outage(tree: Tree, origin: HidingOrigin, clock: WallClock) -> None:
    await tree.restart(replace(TTLS, stale_if_error_s=1000))
    await tree.find(HIDDEN)
    await tree.names()
    await tree.names((await tree.find("d")).ino)
    clock.advance(101)
    origin.down = OriginUnavailableError("no answer from fake://test")
    assert (await tree.find(HIDDEN)).is_dir
    assert sorted(await tree.names()) == SHOWN
    with pytest.raises(OriginUnavailableError):
        await tree.find(f"d/{HIDDEN}")  # nothing is known of it
    with pytest.raises(NotFoundError):
        await tree.find("none")
