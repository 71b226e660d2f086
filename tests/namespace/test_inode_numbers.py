"""No inode number is used twice: the kernel may still have the pages of the first file."""

import pytest

from cachefs.db.write_ahead_log import log_paths
from cachefs.errors import CacheDirError
from cachefs.namespace import inode_numbers
from cachefs.namespace.inodes import ROOT_INO
from tests.full_database import FullDatabase
from tests.namespace.harness import ScriptedOrigin, Tree, WallClock

pytestmark = pytest.mark.expect_log("can't write the database", required=False)


@pytest.fixture
async def outlived(tree: Tree) -> Tree:
    """A tree whose kernel goes on after a SIGKILL."""
    tree.no_open = True
    await tree.restart()
    return tree


async def test_kills_while_the_disk_is_full(
    outlived: Tree, origin: ScriptedOrigin, full_database: FullDatabase
) -> None:
    """Each process goes on after all that the one before has told the kernel."""
    known = {}
    full_database.is_full = True
    for kill in range(4):
        for number in range(3):
            name = f"{kill}-{number}"
            origin.put(name, b"x")
            known[name] = (await outlived.find(name)).ino
        await outlived.db.commit()
        await outlived.restart(crash=True)
        assert {name: (await outlived.find(name)).ino for name in known} == known
    assert len(set(known.values())) == len(known)


async def test_kills_while_neither_disk_nor_journal_can_be_written(
    outlived: Tree,
    origin: ScriptedOrigin,
    full_database: FullDatabase,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: object,
) -> None:
    """The last reservation is used up by the process that has it: the next one has none."""
    expect_log("if the daemon dies now|can't keep a write-ahead log")  # type: ignore[operator]
    origin.put("known", b"x")
    known = await outlived.find("known")
    await outlived.db.commit()
    full_database.is_full = True
    with monkeypatch.context() as full:
        full.setattr("cachefs.db.write_ahead_log.os.writev", lambda fd, buffers: 0)
        origin.put("lost", b"x")
        lost = await outlived.find("lost")
        await outlived.restart(crash=True)
        assert await outlived.find("known") == known
        origin.put("new", b"y")
        for _ in range(2):
            with pytest.raises(CacheDirError, match="free some space"):
                await outlived.find("new")
        with pytest.raises(CacheDirError, match="free some space"):
            await outlived.names()
        full_database.is_full = False
        await outlived.db.commit()
        new = await outlived.find("new")
    assert new.ino > lost.ino


async def test_a_replaced_file_keeps_its_name_while_there_is_no_number_for_it(
    tree: Tree, origin: ScriptedOrigin, full_database: FullDatabase
) -> None:
    origin.put("a", b"x")
    old = await tree.find("a")
    full_database.is_full = True
    await tree.restart(crash=True)
    await tree.restart(crash=True)
    origin.put("a", b"other")
    with pytest.raises(CacheDirError):
        await tree.find("a")
    assert not list(tree.db.scan("orphans", b""))
    full_database.is_full = False
    await tree.db.commit()
    assert (await tree.find("a")).ino > old.ino


async def test_a_reservation_is_renewed_long_before_it_ends(
    tree: Tree, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every commit fewer are handed out than half of it."""
    monkeypatch.setattr(inode_numbers, "_RESERVE", 32)
    await tree.restart()
    for directory in range(20):
        for number in range(12):
            origin.put(f"{directory}/{number}", b"x")
    for directory in range(20):
        names = await tree.entries((await tree.find(f"{directory}")).ino)
        assert len(names) == 12
        await tree.db.commit()


@pytest.mark.parametrize("stored", [None, 3])
async def test_numbers_go_on_after_every_one_that_is_there(
    outlived: Tree, origin: ScriptedOrigin, clock: WallClock, stored: int | None
) -> None:
    """Whatever a damaged row says."""
    for number in range(10):
        origin.put(f"{number}", b"x")
    last = max((await outlived.entries(ROOT_INO)).values())
    if stored is None:
        outlived.db.delete("meta", b"next_ino")
    else:
        outlived.db.put("meta", b"next_ino", stored.to_bytes(8, "big"))
    outlived.db.write_ahead()
    await outlived.restart(crash=True)
    clock.advance(200)
    origin.put("new", b"x")
    assert (await outlived.find("new")).ino > last


async def test_without_a_number_that_was_ever_reserved_nothing_is_shown(
    tree: Tree, origin: ScriptedOrigin, full_database: FullDatabase, tmp_path: object
) -> None:
    tree.db.abandon()
    full_database.is_full = True
    tree.path = tree.path.with_name("new")
    await tree.start()
    tree.namespace.outlive()
    assert not any(path.exists() for path in log_paths(tree.path / "journal"))
    origin.put("a", b"x")
    with pytest.raises(CacheDirError):
        await tree.find("a")
    full_database.is_full = False
    await tree.db.commit()
    await tree.find("a")
