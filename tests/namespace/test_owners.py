"""Owner, group and mode: of one inode, and changed in place."""

import stat

import pytest

from cachefs.errors import OriginUnavailableError
from cachefs.format.inode_record import KIND_DIR, KIND_FILE, Inode
from cachefs.fuse.attrs import AttrBuilder, Ownership
from cachefs.types import NO_POSIX, Posix
from tests.namespace.harness import ROOT_INO, ScriptedOrigin, Tree, WallClock

ALICE = Posix(1000, 100, 0o640)
BOB = Posix(1001, 100, 0o600)


def put(origin: ScriptedOrigin) -> None:
    origin.put("d/f", b"data")
    origin.chmod("d/f", ALICE)
    origin.chmod("d", ALICE)


async def test_they_are_those_of_the_origin(tree: Tree, origin: ScriptedOrigin) -> None:
    put(origin)
    assert (await tree.find("d/f")).posix == ALICE
    assert (await tree.find("d")).posix == ALICE
    ino = (await tree.entries((await tree.find("d")).ino))[b"f"]
    assert tree.namespace.table.stat(ino) is not None
    assert tree.namespace.table.stat(ino)[3:] == ALICE
    await tree.restart(crash=False)
    assert (await tree.find("d/f")).posix == ALICE


def test_a_mode_never_changes_what_a_thing_is() -> None:
    """Whatever stands in a table: of a mode only permission bits count."""
    builder = AttrBuilder(Ownership())
    for mode in (stat.S_IFLNK | 0o777, stat.S_IFSOCK, stat.S_ISUID | 0o755, 0o7777):
        file = builder.build(Inode(2, KIND_FILE, 1, b"a", 0, 0, "v", Posix(0, 0, mode)), 0, 0)
        directory = builder.build(Inode(2, KIND_DIR, 1, b"a", 0, 0, "", Posix(0, 0, mode)), 0, 0)
        assert file.st_mode == stat.S_IFREG | 0o644
        assert directory.st_mode == stat.S_IFDIR | 0o755


async def test_an_origin_without_owners(tree: Tree, origin: ScriptedOrigin) -> None:
    origin.put("d/f", b"data")
    await tree.namespace.observe_root()
    await tree.entries()
    assert origin.take_requests() == [("list", "")], "none for the root"
    assert [(await tree.find(path)).posix for path in ("d", "d/f")] == [NO_POSIX, NO_POSIX]


@pytest.mark.parametrize("path", ["d", "d/f"])
@pytest.mark.parametrize("by", ["look-up", "listing"])
async def test_a_change_is_no_new_inode_and_no_new_version(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, path: str, by: str
) -> None:
    put(origin)
    directory = await tree.find("d")
    await tree.entries()
    await tree.entries(directory.ino)
    before = await tree.find(path)
    times = [tree.mtime_ns(ino) for ino in (ROOT_INO, directory.ino)]
    origin.chmod(path, BOB)
    clock.advance(101)
    tree.changed.clear()
    if by == "listing":
        await tree.entries(before.parent)
    after = await tree.find(path)
    assert after.posix == BOB
    assert _without_owner(after) == _without_owner(before)
    assert tree.changed == [before.ino], "the kernel is told, once"
    assert tree.unbound == []
    assert [tree.mtime_ns(ino) for ino in (ROOT_INO, directory.ino)] == times


def _without_owner(inode: Inode) -> tuple:
    return (inode.ino, inode.parent, inode.name, inode.size_bytes, inode.mtime_ns, inode.version)


async def test_an_unchanged_listing_writes_only_its_own_row(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    put(origin)
    for number in range(20):
        origin.put(f"f{number}", b"x")
        origin.chmod(f"f{number}", ALICE)
    await tree.entries()
    await tree.db.commit()
    clock.advance(101)
    await tree.entries()
    assert tree.db.pending_count == 1
    clock.advance(101)
    await tree.db.commit()
    origin.chmod("f7", BOB)
    await tree.entries()
    assert tree.db.pending_count == 2, "and that of the inode"


async def test_an_older_answer_changes_nothing(tree: Tree, origin: ScriptedOrigin) -> None:
    put(origin)

    async def changed_and_listed(path: str) -> None:
        origin.after_stat = None
        origin.chmod("d", BOB)
        await tree.entries()

    origin.after_stat = changed_and_listed
    assert (await tree.find("d")).posix == BOB


async def test_the_root_has_an_owner_too(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    put(origin)
    origin.chmod("", BOB)
    assert tree.namespace.inode(ROOT_INO).posix == NO_POSIX
    await tree.namespace.observe_root()
    assert tree.namespace.inode(ROOT_INO).posix == BOB
    await tree.entries()
    origin.chmod("", ALICE)
    tree.changed.clear()
    clock.advance(101)
    await tree.entries()
    assert tree.namespace.inode(ROOT_INO).posix == ALICE
    assert tree.changed == [ROOT_INO]


async def test_an_origin_that_is_away_leaves_them_as_they_are(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    put(origin)
    origin.chmod("", BOB)
    await tree.namespace.observe_root()
    origin.down = OriginUnavailableError("away")
    with pytest.raises(OriginUnavailableError):
        await tree.namespace.observe_root()
    assert tree.namespace.inode(ROOT_INO).posix == BOB
