"""Rows of the namespace that the disk has damaged: no wrong name, no wrong attribute, and no name
that seems to be absent."""

from dataclasses import replace

import lmdb
import pytest

from cachefs.db.environment import DATA_NAME
from cachefs.db.row_sums import stored_name
from cachefs.errors import NotFoundError, OriginUnavailableError
from cachefs.format.inode_record import TABLES, dirent_key, ino_key
from cachefs.namespace.inodes import ROOT_INO
from cachefs.namespace.transfer import known_pieces
from tests.namespace.harness import TTLS, ScriptedOrigin, Tree

pytestmark = pytest.mark.expect_log(
    "a row of .* has a wrong checksum or is lost|the origin does not answer", required=False
)

LONG = replace(TTLS, attr_s=1e6, entry_s=1e6, negative_s=1e6, list_s=1e6, stale_if_error_s=1e9)
NAMES = [f"n{number:03}" for number in range(64)]


class Damaged:
    """The rows on disk of a tree that is closed."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    async def change(self, table: str, key: bytes, old: bytes, new: bytes) -> None:
        """Replace bytes of a row, key included, without its checksum."""
        file = self._tree.path / DATA_NAME
        self._tree.db.close()
        data = file.read_bytes()
        stored = self._row(table, key)
        changed = (key + stored).replace(old, new, 1)
        assert changed != key + stored
        assert key + stored in data
        file.write_bytes(data.replace(key + stored, changed))
        await self._tree.start(LONG)

    async def lose(self, table: str, key: bytes) -> None:
        """Remove a row, as a damaged page does."""
        self._tree.db.close()
        with self._opened() as env, env.begin(write=True) as txn:
            assert txn.delete(key, db=env.open_db(stored_name(table), txn=txn))
        await self._tree.start(LONG)

    def _opened(self) -> lmdb.Environment:
        return lmdb.open(str(self._tree.path), max_dbs=len(TABLES))

    def _row(self, table: str, key: bytes) -> bytes:
        with self._opened() as env, env.begin() as txn:
            row = txn.get(key, db=env.open_db(stored_name(table), txn=txn, create=False))
        assert isinstance(row, bytes)
        return row


@pytest.fixture
async def damaged(tree: Tree, origin: ScriptedOrigin) -> Damaged:
    for number, name in enumerate(NAMES):
        origin.put(f"d/{name}", b"x" * number)
    await tree.restart(LONG)
    directory = await tree.find("d")
    assert len(await tree.entries(directory.ino)) == len(NAMES)
    await tree.restart(LONG)
    origin.take_requests()
    return Damaged(tree)


async def all_is_right(tree: Tree) -> None:
    directory = await tree.find("d")
    assert await tree.names(directory.ino) == NAMES
    for number, name in enumerate(NAMES):
        inode = await tree.find(f"d/{name}")
        assert (inode.name.decode(), inode.size_bytes) == (name, number)
    with pytest.raises(NotFoundError):
        await tree.find("d/none")


async def numbers(tree: Tree) -> tuple[int, int]:
    directory = await tree.find("d")
    return directory.ino, (await tree.find("d/n005")).ino


@pytest.mark.parametrize("reads_first", [True, False])
async def test_a_name_with_the_inode_number_of_another(
    tree: Tree, damaged: Damaged, reads_first: bool
) -> None:
    directory, ino = await numbers(tree)
    key = dirent_key(directory, b"n005")
    await damaged.change("dirents", key, ino.to_bytes(8, "little"), (ino ^ 1).to_bytes(8, "little"))
    if reads_first:
        assert await tree.names((await tree.find("d")).ino) == NAMES
    await all_is_right(tree)


@pytest.mark.parametrize("reads_first", [True, False])
async def test_a_name_and_its_inode_name_each_other(
    tree: Tree, damaged: Damaged, reads_first: bool
) -> None:
    """Rows whose checksums are right, as those of a page that was written long ago."""
    directory, _ = await numbers(tree)
    five, six = (dirent_key(directory, name) for name in (b"n005", b"n006"))
    other = tree.db.get("dirents", six)
    assert other is not None
    tree.db.put("dirents", five, other)
    await tree.restart(LONG)
    if reads_first:
        for name, ino in (await tree.entries(directory)).items():
            if tree.namespace.table.stat(ino, (directory, name)) is None:
                assert name == b"n005"
                await tree.namespace.find_lost(directory, name)
                assert (await tree.entries(directory))[name] != ino
    await all_is_right(tree)
    await tree.restart(LONG)
    await all_is_right(tree)


@pytest.mark.parametrize("change", ["size", "mode", "version", "key"])
async def test_an_inode_with_other_attributes(tree: Tree, damaged: Damaged, change: str) -> None:
    _, ino = await numbers(tree)
    old, new = {
        "size": (b"\5" + bytes(7), b"\x85" + bytes(7)),
        "mode": (b"\2\4", b"\2\5"),
        "version": (b"n005", b"n005"[::-1]),
        "key": (ino_key(ino), ino_key(ino | 1 << 20)),
    }[change]
    await damaged.change("inodes", ino_key(ino), old, new)
    await all_is_right(tree)


async def test_a_name_whose_own_bytes_have_changed(tree: Tree, damaged: Damaged) -> None:
    directory, _ = await numbers(tree)
    await damaged.change("dirents", dirent_key(directory, b"n005"), b"n005", b"n004")
    await all_is_right(tree)


async def test_a_name_that_went_to_another_directory(tree: Tree, damaged: Damaged) -> None:
    """A scan of the directory ends there."""
    directory, _ = await numbers(tree)
    key = dirent_key(directory, b"n005")
    await damaged.change("dirents", key, key, b"\1" + key[1:])
    await all_is_right(tree)


@pytest.mark.parametrize("table", ["dirents", "inodes", "listings"])
async def test_a_row_that_is_gone(tree: Tree, damaged: Damaged, table: str) -> None:
    directory, ino = await numbers(tree)
    key = {
        "dirents": dirent_key(directory, b"n005"),
        "inodes": ino_key(ino),
        "listings": ino_key(directory),
    }[table]
    await damaged.lose(table, key)
    await all_is_right(tree)


async def test_a_look_up_alone_finds_a_name_that_is_gone(
    tree: Tree, damaged: Damaged, origin: ScriptedOrigin
) -> None:
    directory, _ = await numbers(tree)
    await damaged.lose("dirents", dirent_key(directory, b"n005"))
    assert (await tree.find("d/n005")).size_bytes == 5
    with pytest.raises(NotFoundError):
        await tree.find("d/none")


async def test_in_an_outage_a_lost_name_is_an_error_and_not_absent(
    tree: Tree, damaged: Damaged, origin: ScriptedOrigin
) -> None:
    directory, _ = await numbers(tree)
    await damaged.lose("dirents", dirent_key(directory, b"n005"))
    origin.down = OriginUnavailableError("away")
    with pytest.raises(OriginUnavailableError):
        await tree.names(directory)
    with pytest.raises(OriginUnavailableError):
        await tree.find("d/n005")
    assert (await tree.find("d/n006")).size_bytes == 6


async def test_after_damage_the_number_of_names_is_right_again(
    tree: Tree, damaged: Damaged, origin: ScriptedOrigin
) -> None:
    directory, ino = await numbers(tree)
    key = dirent_key(directory, b"n005")
    await damaged.change("dirents", key, ino.to_bytes(8, "little"), (ino ^ 1).to_bytes(8, "little"))
    await all_is_right(tree)
    await tree.restart(LONG)
    origin.take_requests()
    assert await tree.names(directory) == NAMES
    with pytest.raises(NotFoundError):
        await tree.find("d/none")
    assert origin.take_requests() == []


async def test_the_root_is_made_again(tree: Tree, damaged: Damaged) -> None:
    await damaged.change("inodes", ino_key(ROOT_INO), b"\xff\xff", b"\0\0")
    await all_is_right(tree)


async def test_a_lost_directory_gets_another_number(tree: Tree, damaged: Damaged) -> None:
    directory, _ = await numbers(tree)
    await damaged.lose("inodes", ino_key(directory))
    await all_is_right(tree)
    assert (await tree.find("d")).ino != directory


async def test_other_nodes_get_no_incomplete_listing(tree: Tree, damaged: Damaged) -> None:
    directory, _ = await numbers(tree)
    await damaged.lose("dirents", dirent_key(directory, b"n005"))
    (piece,) = [piece for piece in known_pieces(tree.db.snapshot()) if piece.path == "d"]
    assert piece.listed_at_ns is None
    assert len(piece.entries) == len(NAMES) - 1


@pytest.mark.parametrize("row", [b"next_ino", b"identity", b"format"])
async def test_rows_of_the_mount_itself(tree: Tree, damaged: Damaged, row: bytes) -> None:
    before = await numbers(tree)
    await damaged.change("meta", row, row, row[:-1] + b"?")
    assert await numbers(tree) == before
    await all_is_right(tree)
    tree.origin.put("new", b"x")
    tree.clock.advance(2e6)
    assert (await tree.find("new")).ino > before[1]
