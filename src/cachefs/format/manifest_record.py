"""Encode and decode rows of the table built from a manifest, format 1 (docs/formats/manifest.md).

A key is the directory's number (u64, big-endian; the root is 0), then the name. Values are
little-endian:

| kind u8     | then                                                                |
|-------------|---------------------------------------------------------------------|
| 1 directory | number u64                                                          |
| 2 file      | size u64, mtime_ns i64, uid u32, gid u32, mode u16, version (UTF-8) |
| 3 file of which only the path is known | nothing                                  |
"""

from struct import Struct
from typing import NamedTuple

from cachefs.types import ObjectMeta, Posix

MANIFEST_FORMAT = 1
TABLES = ("rows", "meta")
ROOT_NUMBER = 0

_DIRECTORY, _FILE, _PATH = 1, 2, 3
_KEY = Struct(">Q")
_DIRECTORY_ROW = Struct("<BQ")
_FILE_ROW = Struct("<BQqIIH")
assert (_DIRECTORY_ROW.size, _FILE_ROW.size) == (9, 27)

PATH_ROW = bytes([_PATH])


class Directory(NamedTuple):
    """A directory that exists because a path in the manifest goes through it."""

    number: int


ManifestRow = Directory | ObjectMeta | None
"""None is a file of which only the path is known: the manifest has no metadata for it."""


def row_key(directory: int, name: bytes) -> bytes:
    """Return the key of a name in a directory. It has at most 263 bytes."""
    return _KEY.pack(directory) + name


def name_of_row(key: bytes) -> bytes:
    """Return the name in a key from `row_key`."""
    return key[_KEY.size :]


def pack_row(row: ManifestRow) -> bytes:
    """Return the value of a row."""
    if row is None:
        return PATH_ROW
    if isinstance(row, Directory):
        return _DIRECTORY_ROW.pack(_DIRECTORY, row.number)
    head = _FILE_ROW.pack(_FILE, row.size_bytes, row.mtime_ns, *row.posix)
    return head + row.version.encode("utf-8", "surrogateescape")


def unpack_row(value: bytes) -> ManifestRow:
    """Invert `pack_row`. Raises `struct.error` or `IndexError` for a value that is too short."""
    if value[0] == _PATH:
        return None
    if value[0] == _DIRECTORY:
        return Directory(_DIRECTORY_ROW.unpack(value)[1])
    _, size_bytes, mtime_ns, uid, gid, mode = _FILE_ROW.unpack_from(value)
    version = value[_FILE_ROW.size :].decode("utf-8", "surrogateescape")
    return ObjectMeta(size_bytes, mtime_ns, version, Posix(uid, gid, mode))
