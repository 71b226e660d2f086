"""Directories that a listing above them has shown need no request of their own."""

import pytest

from cachefs.errors import NotFoundError
from cachefs.namespace.directories.prefetched_listings import PrefetchedListings
from cachefs.types import Entry
from tests.namespace.harness import NS, ScriptedOrigin, Tree, WallClock, read_directory


@pytest.fixture
def origin() -> ScriptedOrigin:
    origin = ScriptedOrigin()
    origin.shows_trees = True
    for package in ("numpy", "torch"):
        for name in ("__init__.py", "nn/__init__.py", "nn/__pycache__/x.pyc"):
            origin.put(f"{package}/{name}", b"data")
    return origin


async def names(tree: Tree, path: str) -> list[str]:
    inode = await tree.find(path)
    return sorted(name.decode() for name in (await read_directory(tree.namespace, inode.ino))[0])


async def test_a_tree_costs_one_listing(tree: Tree, origin: ScriptedOrigin) -> None:
    assert await tree.names() == ["numpy", "torch"]
    assert await names(tree, "torch") == ["__init__.py", "nn"]
    assert (await tree.find("torch/nn/__pycache__/x.pyc")).size_bytes == 4
    with pytest.raises(NotFoundError):
        await tree.find("numpy/nn/__pycache__/y.pyc")
    assert await names(tree, "numpy/nn") == ["__init__.py", "__pycache__"]
    assert origin.take_requests() == [("list", "")]


async def test_what_was_seen_is_as_old_as_the_listing_that_saw_it(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    await tree.names()
    clock.advance(50)
    await names(tree, "torch")
    origin.put("torch/new", b"")
    clock.advance(49)
    assert await names(tree, "torch") == ["__init__.py", "nn"]
    clock.advance(2)
    origin.take_requests()
    assert await names(tree, "torch") == ["__init__.py", "new", "nn"]
    assert ("list", "torch") in origin.take_requests()


async def test_it_is_not_used_for_ever(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    await tree.names()
    clock.advance(61)
    origin.take_requests()
    await names(tree, "torch")
    assert origin.take_requests() == [("list", "torch")]


async def test_who_wants_a_newer_listing_gets_one(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    await tree.names()
    torch = await tree.find("torch")
    origin.put("torch/new", b"")
    origin.take_requests()
    clock.advance(1)
    snapshot = await tree.namespace.listed_since(torch.ino, clock.now_ns())
    assert len(snapshot) == 3
    assert origin.take_requests() == [("list", "torch")]
    assert await names(tree, "torch") == ["__init__.py", "new", "nn"], "not what was seen before"


async def test_a_look_up_that_knows_better(tree: Tree, origin: ScriptedOrigin) -> None:
    await tree.names()
    torch = await tree.find("torch")
    origin.delete("torch/__init__.py")
    with pytest.raises(NotFoundError):
        await tree.namespace.lookup_since(torch.ino, b"__init__.py", tree.clock.now_ns())
    assert await names(tree, "torch") == ["nn"]


async def test_it_serves_in_an_outage(tree: Tree, origin: ScriptedOrigin) -> None:
    await tree.names()
    origin.fail_next(100, AssertionError("a request"))
    assert await names(tree, "torch/nn/__pycache__") == ["x.pyc"]


def test_a_bound(clock: WallClock) -> None:
    prefetched = PrefetchedListings(clock, 60 * NS)
    entries = [Entry("name", None)] * 1000
    for number in range(100):
        prefetched.add({f"d{number}": entries}, clock.now_ns())
    known = [number for number in range(100) if prefetched.knows(f"d{number}")]
    assert known == list(range(81, 100))
    clock.advance(61)
    prefetched.add({}, clock.now_ns())
    assert not prefetched
