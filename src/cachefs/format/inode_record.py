"""Encode and decode rows of the namespace database, format 3 (docs/formats/namespace.md).

Integers are little-endian in values and big-endian in keys, so that keys sort by number. Times
are nanoseconds since 1970 (wall clock). Names and versions are bytes of UTF-8; bytes that are not
valid UTF-8 are kept as surrogate escapes in `str`.

| table    | key                      | value                                              |
|----------|--------------------------|----------------------------------------------------|
| inodes   | ino u64                  | kind u8, name length u8, mode u16, parent u64,     |
|          |                          | size u64, mtime_ns i64, uid u32, gid u32, name,    |
|          |                          | version (UTF-8); the size of a directory is the    |
|          |                          | number of its rows in `dirents`                    |
| dirents  | parent u64, name         | ino u64, checked_at_ns i64, negative for a name    |
|          |                          | that no listing has shown                          |
| listings | directory ino u64        | listed_at_ns i64, entry count u64                  |
| orphans  | ino u64                  | empty                                              |
| meta     | name                     | free form: `format`, `identity`, `next_ino` (u64)  |
| times    | ino u64                  | ctime_ns i64, atime_ns i64                         |
"""

import struct
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

from cachefs.types import MOST_SIZE_BYTES, NO_POSIX, Posix, storable_ns

BadRecordError = struct.error
"""All `unpack_*` functions and `ino_of_key` raise this for a record that they can't decode. The
`pack_*` functions raise it for a number that doesn't fit its field."""

FORMAT_VERSION = 3
TABLES = ("inodes", "dirents", "listings", "orphans", "meta", "times")
KIND_DIR = 1
KIND_FILE = 2
_KINDS = (KIND_DIR, KIND_FILE)

_INO_KEY = Struct(">Q")
_INODE = Struct("<BBHQQqII")
_DIRENT = Struct("<Qq")
_LISTING = Struct("<qQ")
_TIMES = Struct("<qq")
assert (_INODE.size, _DIRENT.size, _LISTING.size, _TIMES.size) == (36, 16, 16, 16)


# Not frozen: to make a frozen one takes five times as long, and each look-up makes several. mypy
# refuses changes of `Final` fields.
@dataclass(slots=True, unsafe_hash=True)
class Inode:
    """One directory, or one version of one object.

    Only `posix` of a file inode ever changes; another version of the object has another inode. For
    a directory, `mtime_ns` is when its listing last changed (see
    `namespace/directories/directory_validators.py`), `size_bytes` is 0, `version` is its place
    (`types.Directory`), and `name_count` is how many names it has in the table `dirents`. The root
    is its own `parent`."""

    ino: Final[int]
    kind: Final[int]
    parent: Final[int]
    name: Final[bytes]
    size_bytes: Final[int]
    mtime_ns: Final[int]
    version: Final[str]
    posix: Final[Posix] = NO_POSIX
    name_count: Final[int] = field(default=0, compare=False)

    @property
    def is_dir(self) -> bool:
        return self.kind == KIND_DIR


class Dirent(NamedTuple):
    """The inode that a name refers to. The request that last confirmed it began at
    `checked_at_ns` (wall clock). Without `is_listed`, a look-up has found the name, and no listing
    shows it (see `Origin.may_hide`)."""

    ino: int
    checked_at_ns: int
    is_listed: bool = True


class Listing(NamedTuple):
    """A complete listing of a directory: when it began (wall clock), and how many names it had."""

    listed_at_ns: int
    entry_count: int


class OwnTimes(NamedTuple):
    """Times of an inode that a writable mount has changed: when its attributes, its name or its
    content last changed, and its atime as a process has set it."""

    ctime_ns: int
    atime_ns: int


def ino_key(ino: int) -> bytes:
    """Return the 8-byte key of an inode number, used by all tables but `dirents` and `meta`."""
    return _INO_KEY.pack(ino)


def ino_of_key(key: bytes) -> int:
    """Return the inode number of a key from `ino_key`. Raises `BadRecordError`."""
    ino: int = _INO_KEY.unpack(key)[0]
    return ino


def dirent_key(parent: int, name: bytes) -> bytes:
    """Return the key of a name in the directory `parent`.

    It has at most 263 bytes, as a name has at most 255; LMDB's limit is 511.
    """
    return _INO_KEY.pack(parent) + name


def name_of_key(key: bytes) -> bytes:
    """Return the name in a key from `dirent_key`."""
    return key[_INO_KEY.size :]


def pack_inode(inode: Inode) -> bytes:
    """Return the value of the inode's row in `inodes`."""
    return pack_inode_of(
        inode.kind,
        inode.parent,
        inode.name,
        inode.name_count if inode.kind == KIND_DIR else inode.size_bytes,
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
    """Do the same as `pack_inode`, without an `Inode` object: faster for millions of rows.

    `posix` is (uid, gid, mode). For a directory, `size_bytes` is the number of its names.
    """
    uid, gid, mode = posix
    time_ns = storable_ns(mtime_ns)
    head = _INODE.pack(kind, len(name), mode, parent, size_bytes, time_ns, uid, gid)
    return head + name + version.encode("utf-8", "surrogateescape")


def unpack_inode(ino: int, record: bytes) -> Inode:
    """Decode the row of the inode `ino`. Raises `BadRecordError`."""
    kind, name_length, mode, parent, size_bytes, mtime_ns, uid, gid = _INODE.unpack_from(record)
    name_end = _INODE.size + name_length
    if size_bytes > MOST_SIZE_BYTES or kind not in _KINDS or name_end > len(record):
        raise BadRecordError("an inode's")
    is_dir = kind == KIND_DIR
    return Inode(
        ino,
        kind,
        parent,
        record[_INODE.size : name_end],
        0 if is_dir else size_bytes,
        mtime_ns,
        record[name_end:].decode("utf-8", "surrogateescape"),
        Posix(uid, gid, mode),
        size_bytes if is_dir else 0,
    )


def unpack_inode_fields(record: bytes) -> tuple[int, bytes, int, int, str, int, int, int, int]:
    """Return (kind, name, size in bytes, mtime_ns, version, uid, gid, mode, parent). For a
    directory, the size is the number of its names.

    Faster than `unpack_inode`, and without its checks of kind, size and name length. Raises
    `BadRecordError` for a record that is too short.
    """
    kind, name_length, mode, parent, size, mtime_ns, uid, gid = _INODE.unpack_from(record)
    name_end = _INODE.size + name_length
    version = record[name_end:].decode("utf-8", "surrogateescape")
    name = record[_INODE.size : name_end]
    return kind, name, size, mtime_ns, version, uid, gid, mode, parent


def unpack_stat(
    record: bytes, named: tuple[int, bytes] | None = None
) -> tuple[int, int, int, int, int, int]:
    """Return (kind, size in bytes, mtime_ns, uid, gid, mode): all that a directory entry needs.

    Faster than `unpack_inode`. Raises `BadRecordError`, also if the inode is not the one that
    `named`, a directory's number and a name in it, refers to.
    """
    kind, name_length, mode, parent, size_bytes, mtime_ns, uid, gid = _INODE.unpack_from(record)
    if size_bytes > MOST_SIZE_BYTES:
        raise BadRecordError("an inode's")
    if named is not None and named != (parent, record[_INODE.size : _INODE.size + name_length]):
        raise BadRecordError("another name's")
    return kind, 0 if kind == KIND_DIR else size_bytes, mtime_ns, uid, gid, mode


def pack_dirent(dirent: Dirent) -> bytes:
    """Return the value of a row in `dirents`."""
    ino, checked_at_ns, is_listed = dirent
    return _DIRENT.pack(ino, checked_at_ns if is_listed else -checked_at_ns)


def unpack_dirent(record: bytes) -> Dirent:
    """Decode the value of a row in `dirents`. Raises `BadRecordError`."""
    ino, checked_at_ns = _DIRENT.unpack(record)
    return Dirent(ino, abs(checked_at_ns), checked_at_ns >= 0)


def pack_listing(listing: Listing) -> bytes:
    """Return the value of a row in `listings`."""
    return _LISTING.pack(*listing)


def unpack_listing(record: bytes) -> Listing:
    """Decode the value of a row in `listings`. Raises `BadRecordError`."""
    return Listing(*_LISTING.unpack(record))


def pack_times(times: OwnTimes) -> bytes:
    """Return the value of a row in `times`."""
    return _TIMES.pack(*map(storable_ns, times))


def unpack_times(record: bytes) -> OwnTimes:
    """Decode the value of a row in `times`. Raises `BadRecordError`."""
    return OwnTimes(*_TIMES.unpack(record))
