"""Rows of the namespace database. Format 2; see docs/formats/namespace.md.

All integers are little-endian in values and big-endian in keys, so that keys sort by number.

| table    | key                      | value                                              |
|----------|--------------------------|----------------------------------------------------|
| inodes   | ino u64                  | kind u8, name length u8, mode u16, parent u64,     |
|          |                          | size u64, mtime_ns i64, uid u32, gid u32, name,    |
|          |                          | version (UTF-8)                                    |
| dirents  | parent u64, name         | ino u64, checked_at_ns i64                         |
| listings | directory ino u64        | listed_at_ns i64, entry count u64                  |
| orphans  | ino u64                  | empty                                              |
| meta     | name                     | free form: `format`, `identity`, `next_ino` (u64)  |
"""

import struct
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from cachefs.types import MOST_SIZE_BYTES, NO_POSIX, Posix

BadRecordError = struct.error
"""What all functions raise here for a record that makes no sense."""

FORMAT_VERSION = 2
TABLES = ("inodes", "dirents", "listings", "orphans", "meta")
KIND_DIR = 1
KIND_FILE = 2
_KINDS = (KIND_DIR, KIND_FILE)

_INO_KEY = Struct(">Q")
_INODE = Struct("<BBHQQqII")
_DIRENT = Struct("<Qq")
_LISTING = Struct("<qQ")
assert (_INODE.size, _DIRENT.size, _LISTING.size) == (36, 16, 16)


@dataclass(frozen=True, slots=True)
class Inode:
    """One directory, or one version of one object: of a file inode only `posix` ever changes.

    `mtime_ns` of a directory is when its listing last changed. `version` of a directory is "".
    """

    ino: int
    kind: int
    parent: int
    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str
    posix: Posix = NO_POSIX

    @property
    def is_dir(self) -> bool:
        return self.kind == KIND_DIR


class Dirent(NamedTuple):
    """What a name stands for, as the origin said at `checked_at_ns` (wall clock)."""

    ino: int
    checked_at_ns: int


class Listing(NamedTuple):
    """A complete listing of a directory, begun at `listed_at_ns` (wall clock)."""

    listed_at_ns: int
    entry_count: int


def ino_key(ino: int) -> bytes:
    return _INO_KEY.pack(ino)


def ino_of_key(key: bytes) -> int:
    ino: int = _INO_KEY.unpack(key)[0]
    return ino


def dirent_key(parent: int, name: bytes) -> bytes:
    """263 bytes at most (a name has 255): below LMDB's limit of 511."""
    return _INO_KEY.pack(parent) + name


def name_of_key(key: bytes) -> bytes:
    return key[_INO_KEY.size :]


def pack_inode(inode: Inode) -> bytes:
    return pack_inode_of(
        inode.kind,
        inode.parent,
        inode.name,
        inode.size_bytes,
        inode.mtime_ns,
        inode.version,
        inode.posix,
    )


def pack_inode_of(
    kind: int,
    parent: int,
    name: bytes,
    size_bytes: int,
    mtime_ns: int,
    version: str,
    posix: tuple[int, int, int],
) -> bytes:
    """`pack_inode` without an `Inode`: for millions of them."""
    uid, gid, mode = posix
    head = _INODE.pack(kind, len(name), mode, parent, size_bytes, mtime_ns, uid, gid)
    return head + name + version.encode("utf-8", "surrogateescape")


def unpack_inode(ino: int, record: bytes) -> Inode:
    """Raises `BadRecordError`."""
    kind, name_length, mode, parent, size_bytes, mtime_ns, uid, gid = _INODE.unpack_from(record)
    name_end = _INODE.size + name_length
    if size_bytes > MOST_SIZE_BYTES or kind not in _KINDS or name_end > len(record):
        raise BadRecordError("an inode's")
    return Inode(
        ino,
        kind,
        parent,
        record[_INODE.size : name_end],
        size_bytes,
        mtime_ns,
        record[name_end:].decode("utf-8", "surrogateescape"),
        Posix(uid, gid, mode),
    )


def unpack_inode_fields(record: bytes) -> tuple[int, bytes, int, int, str, int, int, int]:
    """(kind, name, size in bytes, mtime_ns, version, uid, gid, mode): `unpack_inode` without an
    `Inode`. Raises `BadRecordError`."""
    kind, name_length, mode, _, size_bytes, mtime_ns, uid, gid = _INODE.unpack_from(record)
    name_end = _INODE.size + name_length
    version = record[name_end:].decode("utf-8", "surrogateescape")
    return kind, record[_INODE.size : name_end], size_bytes, mtime_ns, version, uid, gid, mode


def unpack_stat(record: bytes) -> tuple[int, int, int, int, int, int]:
    """(kind, size in bytes, mtime_ns, uid, gid, mode) alone: all that a directory entry needs.
    Raises `BadRecordError`."""
    kind, _, mode, _, size_bytes, mtime_ns, uid, gid = _INODE.unpack_from(record)
    if size_bytes > MOST_SIZE_BYTES:
        raise BadRecordError("an inode's")
    return kind, size_bytes, mtime_ns, uid, gid, mode


def pack_dirent(dirent: Dirent) -> bytes:
    return _DIRENT.pack(*dirent)


def unpack_dirent(record: bytes) -> Dirent:
    """Raises `BadRecordError`."""
    return Dirent(*_DIRENT.unpack(record))


def pack_listing(listing: Listing) -> bytes:
    return _LISTING.pack(*listing)


def unpack_listing(record: bytes) -> Listing:
    """Raises `BadRecordError`."""
    return Listing(*_LISTING.unpack(record))
