"""docs/formats/namespace.md and object_id.md, held to the byte."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.format import inode_record as record
from cachefs.format.inode_record import Dirent, Inode, Listing, OwnTimes
from cachefs.format.object_id import OBJECT_ID_BYTES, object_id
from cachefs.types import Posix

FILE = Inode(
    0x1234,
    record.KIND_FILE,
    0x42,
    "ä.jpg".encode(),
    100_000,
    1_700_000_000_000_000_000,
    '"e1"',
    Posix(1000, 0x01020304, 0o640),
)
FILE_BYTES = bytes.fromhex(
    "02 06 a001 4200000000000000 a086010000000000 00002a36fe9c9717 e8030000 04030201"
    "c3a42e6a7067"  # name
    "22653122"  # version
)
DIRECTORY = Inode(2, record.KIND_DIR, 1, b"d", 0, -1, "", name_count=7)
DIRECTORY_BYTES = bytes.fromhex(
    "01 01 ffff 0100000000000000 0700000000000000 ffffffffffffffff ffffffff ffffffff 64"
)


def test_format_version_and_tables_are_those_of_the_document() -> None:
    assert record.FORMAT_VERSION == 3
    assert record.TABLES == ("inodes", "dirents", "listings", "orphans", "meta", "times")


@pytest.mark.parametrize(("inode", "golden"), [(FILE, FILE_BYTES), (DIRECTORY, DIRECTORY_BYTES)])
def test_inode_golden_bytes(inode: Inode, golden: bytes) -> None:
    assert record.pack_inode(inode) == golden
    assert record.unpack_inode(inode.ino, golden) == inode
    assert record.unpack_inode(inode.ino, golden).name_count == inode.name_count
    assert record.unpack_stat(golden, (inode.parent, inode.name)) == record.unpack_stat(golden)
    for other in ((inode.parent + 1, inode.name), (inode.parent, inode.name + b"x")):
        with pytest.raises(record.BadRecordError):
            record.unpack_stat(golden, other)
    assert record.unpack_stat(golden) == (
        inode.kind,
        inode.size_bytes,
        inode.mtime_ns,
        *inode.posix,
    )


def test_key_golden_bytes() -> None:
    assert record.ino_key(0x0102030405060708).hex() == "0102030405060708"
    assert record.ino_of_key(bytes.fromhex("0102030405060708")) == 0x0102030405060708
    assert record.dirent_key(2, b"name") == bytes.fromhex("0000000000000002") + b"name"
    assert record.name_of_key(record.dirent_key(2, b"name")) == b"name"
    assert len(record.dirent_key(2, b"n" * 255)) == 263


def test_dirent_golden_bytes() -> None:
    golden = bytes.fromhex("0300000000000000 00002a36fe9c9717")
    assert record.pack_dirent(Dirent(3, 1_700_000_000_000_000_000)) == golden
    assert record.unpack_dirent(golden) == Dirent(3, 1_700_000_000_000_000_000)
    unlisted = Dirent(3, 1_700_000_000_000_000_000, is_listed=False)
    golden = bytes.fromhex("0300000000000000 0000d6c9016368e8")
    assert record.pack_dirent(unlisted) == golden
    assert record.unpack_dirent(golden) == unlisted


def test_listing_golden_bytes() -> None:
    golden = bytes.fromhex("00002a36fe9c9717 a086010000000000")
    assert record.pack_listing(Listing(1_700_000_000_000_000_000, 100_000)) == golden
    assert record.unpack_listing(golden) == Listing(1_700_000_000_000_000_000, 100_000)


def test_times_golden_bytes() -> None:
    golden = bytes.fromhex("00002a36fe9c9717 ffffffffffffffff")
    assert record.pack_times(OwnTimes(1_700_000_000_000_000_000, -1)) == golden
    assert record.unpack_times(golden) == OwnTimes(1_700_000_000_000_000_000, -1)


@given(
    st.builds(
        Inode,
        ino=st.integers(1, 2**64 - 1),
        kind=st.sampled_from([record.KIND_DIR, record.KIND_FILE]),
        parent=st.integers(1, 2**64 - 1),
        name=st.binary(max_size=255),
        size_bytes=st.integers(0, record.MOST_SIZE_BYTES),
        mtime_ns=st.integers(1 - 2**63, 2**63 - 1),
        version=st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
        | st.binary(max_size=80).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
        posix=st.builds(
            Posix, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
        ),
    )
)
def test_inodes_come_back_as_they_were(inode: Inode) -> None:
    if inode.is_dir:
        inode = replace(inode, size_bytes=0, name_count=inode.size_bytes)
    assert record.unpack_inode(inode.ino, record.pack_inode(inode)).name_count == inode.name_count
    assert record.unpack_inode(inode.ino, record.pack_inode(inode)) == inode


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_keys_sort_by_number(numbers: list[int]) -> None:
    keys = sorted(record.ino_key(number) for number in numbers)
    assert [record.ino_of_key(key) for key in keys] == sorted(numbers)


@pytest.mark.parametrize(
    ("identity", "path", "version", "golden"),
    [
        ("s3://bucket/prefix", "a/b.jpg", '"0cc175b9c0f1b6a8"', "7b5cde3ff6de0a206819946caf3453b7"),
        ("", "", "", "4758ddac5f9ee9383325230e1f285505"),
        ("file:///data", "ä", "1:2", "f8fe69579474fa42562b8204ce0a67c3"),
        ("file:///data", "\udcff", "1:2", "2f25ff574604e9c050cb6273bc3938fe"),
    ],
)
def test_object_id_golden_bytes(identity: str, path: str, version: str, golden: str) -> None:
    assert object_id(identity, path, version).hex() == golden
    assert len(object_id(identity, path, version)) == OBJECT_ID_BYTES


def test_object_ids_differ_where_a_part_does() -> None:
    assert len({object_id(*parts) for parts in ("abc", "abd", "aec", "fbc")}) == 4
    assert object_id("a", "bc", "d") != object_id("ab", "c", "d")
