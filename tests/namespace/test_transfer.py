"""What one node knows, taken over by another: docs/formats/metadata.md."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from cachefs.control.routes.metadata import MetadataRoutes
from cachefs.errors import CachefsError, UsageError
from cachefs.format.inode_record import Dirent, dirent_key, ino_key, pack_dirent
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.transfer import KnownEntry
from cachefs.types import Posix
from tests.namespace.harness import ScriptedOrigin, Tree, WallClock


@pytest.fixture
async def other(
    tmp_path: Path, origin: ScriptedOrigin, clock: WallClock, nursery: trio.Nursery
) -> AsyncIterator[Tree]:
    """Another node: the same origin, the same time, a namespace of its own."""
    tree = Tree(tmp_path / "other", nursery, origin, clock)
    await tree.start()
    yield tree
    tree.db.abandon()


def routes(tree: Tree) -> MetadataRoutes:
    return MetadataRoutes(tree.namespace, tree.db, tree.origin, None)


async def exported(tree: Tree) -> list[dict]:
    """As it would come over the socket."""
    return [json.loads(json.dumps(line)) async for line in routes(tree).export({})]


async def take(tree: Tree, lines: list[dict]) -> int:
    head, *pieces = lines
    arguments = {"identity": head["identity"], "root": head["root"], "pieces": pieces}
    answer = await routes(tree).take(arguments)
    return int(str(answer["bound"]))


def fill(origin: ScriptedOrigin, count: int = 5) -> None:
    for number in range(count):
        origin.put(f"dir/{number:05}", b"x" * number)
    origin.put("dir/deep/er/file", b"deep")
    origin.put("top", b"")


async def walk(tree: Tree, ino: int = 1, prefix: str = "") -> dict[str, tuple]:
    found: dict[str, tuple] = {}
    for name, child in (await tree.entries(ino)).items():
        inode = tree.namespace.inode(child)
        path = prefix + name.decode()
        if inode.is_dir:
            found |= await walk(tree, child, path + "/")
        else:
            found[path] = (inode.size_bytes, inode.mtime_ns, inode.version)
    return found


async def test_the_whole_tree_without_a_request(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin, 2_500)
    wanted = await walk(tree)
    lines = await exported(tree)
    origin.take_requests()
    assert await take(other, lines) == 2_500 + 5
    assert await walk(other) == wanted
    with pytest.raises(CachefsError):
        await other.find("dir/absent")
    assert (await other.find("dir/deep/er/file")).version == wanted["dir/deep/er/file"][2]
    assert origin.take_requests() == []
    assert await take(other, lines) == 0
    await other.restart()
    assert await walk(other) == wanted
    assert origin.take_requests() == []


async def test_it_is_as_old_as_it_was(
    tree: Tree, other: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    fill(origin)
    await walk(tree)
    clock.advance(60)
    await take(other, await exported(tree))
    origin.take_requests()
    clock.advance(30)
    await walk(other)
    assert origin.take_requests() == []
    clock.advance(30)
    await walk(other)
    assert len(origin.take_requests()) >= 4


async def test_what_is_known_in_part_is_asked_for_the_rest(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin)
    await tree.find("dir/00003")
    await take(other, await exported(tree))
    origin.take_requests()
    await other.find("dir/00003")
    assert origin.take_requests() == []
    await other.find("dir/00004")
    assert origin.take_requests() == [("stat", "dir/00004")]
    assert len(await walk(other)) == 7


async def test_newer_knowledge_stays(
    tree: Tree, other: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    fill(origin)
    await walk(tree)
    clock.advance(1)
    lines = await exported(tree)
    origin.put("dir/00001", b"another")
    origin.put("dir/new", b"new")
    origin.delete("dir/00002")
    wanted = await walk(other)
    assert await take(other, lines) == 0
    assert await walk(other) == wanted
    assert "dir/new" in wanted
    assert "dir/00002" not in wanted


async def test_newer_look_ups_stay_and_the_rest_is_taken(
    tree: Tree, other: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    fill(origin)
    await walk(tree)
    clock.advance(1)
    lines = await exported(tree)
    origin.put("dir/00001", b"another")
    origin.put("dir/new", b"new")
    origin.delete("dir/00002")
    changed = await other.find("dir/00001")
    new = await other.find("dir/new")
    with pytest.raises(CachefsError):
        await other.find("dir/00002")
    await take(other, lines)
    origin.take_requests()
    found = await walk(other)
    assert found["dir/00001"][2] == changed.version
    assert found["dir/new"][2] == new.version
    assert "dir/00002" not in found
    assert "dir/00003" in found
    assert origin.take_requests() == []


async def test_an_older_listing_is_replaced(
    tree: Tree, other: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    fill(origin)
    await walk(other)
    mtime_ns = other.mtime_ns((await other.find("dir")).ino)
    clock.advance(1)
    origin.delete("dir/00000")
    origin.delete("dir/00004")
    origin.put("dir/00002", b"another")
    wanted = await walk(tree)
    other.unbound.clear()
    assert await take(other, await exported(tree)) == 1
    origin.take_requests()
    assert await walk(other) == wanted
    assert origin.take_requests() == []
    assert sorted(name for _, name in other.unbound) == [b"00000", b"00002", b"00004"]
    assert other.mtime_ns((await other.find("dir")).ino) > mtime_ns


async def test_an_import_that_is_broken_off_hides_nothing(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin, 1_500)
    wanted = await walk(tree)
    lines = await exported(tree)
    cut = next(n for n, line in enumerate(lines) if line.get("path") == "dir")
    assert not lines[cut]["is_last"]
    await take(other, lines[: cut + 1])
    origin.take_requests()
    assert await walk(other) == wanted
    assert ("list", "dir") in origin.take_requests()


async def test_names_that_are_no_utf8_make_their_directory_incomplete(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    origin.put("dir/caf\udce9", b"1")
    origin.put("dir/cafe", b"1")
    origin.put("good/cafe", b"1")
    for name in ("dir", "good"):
        await tree.entries((await tree.find(name)).ino)
    await tree.entries()
    lines = await exported(tree)
    assert "udce9" not in json.dumps(lines)
    await take(other, lines)
    origin.take_requests()
    assert len(await other.entries((await other.find("good")).ino)) == 1
    assert len(await other.entries((await other.find("dir")).ino)) == 2
    assert origin.take_requests() == [("list", "dir")]


async def test_owners_and_empty_directories_come_along(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    origin.put("dir/file", b"1")
    origin.chmod("dir", Posix(1, 2, 0o750))
    origin.chmod("dir/file", Posix(3, 4, 0o640))
    origin.chmod("", Posix(5, 6, 0o700))
    await tree.namespace.observe_root()
    await tree.find("dir/file")
    origin.delete("dir/file")
    with pytest.raises(CachefsError):
        await tree.entries((await tree.find("dir")).ino)
    await take(other, await exported(tree))
    assert other.namespace.inode(1).posix == Posix(5, 6, 0o700)
    assert (await other.find("dir")).posix == Posix(1, 2, 0o750)


async def test_times_from_the_future_count_for_nothing(
    tree: Tree, other: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    fill(origin)
    await walk(tree)
    lines = await exported(tree)
    clock.advance(-10)
    await take(other, lines)
    origin.take_requests()
    assert len(await walk(other)) == 7
    assert len(origin.take_requests()) >= 4


async def test_a_change_while_it_is_exported_is_in_it_or_not(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin, 3_000)
    wanted = await walk(tree)
    export = routes(tree).export({})
    lines = [await anext(export), await anext(export)]
    origin.delete("dir/00000")
    origin.put("dir/new", b"new")
    await tree.namespace.listed_since((await tree.find("dir")).ino, tree.namespace.clock.now_ns())
    lines += [line async for line in export]
    await take(other, json.loads(json.dumps(lines)))
    assert await walk(other) == wanted


async def test_what_is_refused(tree: Tree, origin: ScriptedOrigin) -> None:
    fill(origin)
    await walk(tree)
    head, *pieces = await exported(tree)
    with pytest.raises(CachefsError, match="this is metadata of s3://other, and the mount is of"):
        await routes(tree).take({"identity": "s3://other", "pieces": pieces})
    of_manifest = MetadataRoutes(tree.namespace, tree.db, tree.origin, "/list")
    with pytest.raises(CachefsError, match="shows what a manifest names"):
        await of_manifest.take({"identity": head["identity"], "pieces": pieces})
    with pytest.raises(CachefsError, match="shows what a manifest names"):
        await anext(of_manifest.export({}))


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [["a"]]},
        {"entries": [["../a", False, 1, 1, "v", 1, 1, 1, 1, None, None]]},
        {"entries": [[5, False, 1, 1, "v", 1, 1, 1, 1, None, None]]},
        {"entries": [["a", False, -1, 1, "v", 1, 1, 1, 1, None, None]]},
        {"entries": [["a", False, "1", 1, "v", 1, 1, 1, 1, None, None]]},
        {"entries": [["a", False, 1, 1, 7, 1, 1, 1, 1, None, None]]},
        {"entries": [["a", False, 1, 1, "v", 1, 1, 1 << 20, 1, None, None]]},
        {"entries": [["b", False, 1, 1, "v", 1, 1, 1, 1, None, None],
                     ["a", False, 1, 1, "v", 1, 1, 1, 1, None, None]]},
        {"entries": 5},
        {"path": 5},
        {"listed_at_ns": "x"},
        {"more": 1},
    ],
)  # fmt: skip
async def test_nonsense_is_refused(tree: Tree, change: dict) -> None:
    piece = {"path": "", "after": "", "is_last": True, "listed_at_ns": 5, "entries": []}
    for nonsense in (piece | change, 5, None, "x"):
        arguments = {"identity": tree.origin.identity, "pieces": [nonsense]}
        with pytest.raises(UsageError):
            await routes(tree).take(arguments)
    assert isinstance(tree.namespace, Namespace)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", 0o120777),
        ("mode", 0o4755),
        ("mode", -1),
        ("size_bytes", -1),
        ("size_bytes", 1 << 63),
        ("name", "a\ud800"),
        ("version", "\ud800"),
    ],
)
async def test_nothing_but_files_and_directories_comes_in(
    tree: Tree, other: Tree, origin: ScriptedOrigin, field: str, value: object
) -> None:
    fill(origin)
    await walk(tree)
    head, *pieces = await exported(tree)
    entry = KnownEntry._make(pieces[1]["entries"][0])
    pieces[1]["entries"][0] = list(entry._replace(**{field: value}))
    with pytest.raises(UsageError):
        await take(other, [head, *pieces])
    await other.restart()


async def test_the_root_stays_a_directory(tree: Tree, other: Tree, origin: ScriptedOrigin) -> None:
    fill(origin)
    await walk(tree)
    head, *pieces = await exported(tree)
    head["root"] = list(KnownEntry._make(head["root"])._replace(mode=0o140777))
    with pytest.raises(UsageError, match="the root can't have the mode"):
        await take(other, [head, *pieces])


@pytest.mark.parametrize("field", ["path", "after"])
async def test_half_a_character_is_no_path(
    tree: Tree, other: Tree, origin: ScriptedOrigin, field: str
) -> None:
    fill(origin)
    await walk(tree)
    head, *pieces = await exported(tree)
    pieces[0][field] = "\ud800"
    with pytest.raises(UsageError, match="not valid Unicode"):
        await take(other, [head, *pieces])


async def test_a_damaged_root_and_circles_end_no_export(
    tree: Tree, other: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin)
    wanted = await walk(tree)
    directory = tree.namespace.table.dirent(1, b"dir")
    assert directory is not None
    tree.db.put("dirents", dirent_key(1, b"circle"), pack_dirent(Dirent(1, 0)))
    tree.db.put("dirents", dirent_key(directory.ino, b"circle"), pack_dirent(directory))
    tree.db.put("listings", ino_key(1), b"no listing")
    lines = await exported(tree)
    await take(other, lines)
    origin.take_requests()
    assert await walk(other) == wanted
