"""The records of the spool's journal and their payloads (docs/formats/spool.md).

Integers are little-endian. Most records refer to a staged file by its number. Times are
nanoseconds since 1970. Text is UTF-8; bytes that are not UTF-8 are kept as surrogate escapes in
`str`. `format/spool_frame.py` has the frame around a payload.
"""

import errno
import os
import struct
import sys
from array import array
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from cachefs.types import (
    MOST_MODE,
    MOST_SIZE_BYTES,
    UNKNOWN_MODE,
    ObjectMeta,
    Posix,
    storable_ns,
)

REQUIRED = 1
"""The flag of a record that a reader must understand."""
RANGES_PER_RECORD = 4096
"""How many ranges one `Ranges` has at most."""
MOST_GROUPS = 1 << 15
"""How many groups one `SentFor` has at most. Linux allows twice as many."""
NONE_REFUSED = (1 << 64) - 1
"""The offset in a `Refused` that says that no write is missing."""
PARTS_PER_RECORD = 10_000
"""How many parts one `PartsStale` has at most."""


class BadRecordError(Exception):
    """The bytes are no record of this journal."""


class Begin(NamedTuple):
    """A file begins to be staged, or what is known of it when the journal is written anew.

    `tracks_extents` (0 or 1) says that the written ranges are in the journal; otherwise the spool
    file has the whole content, and its length is the size."""

    number: int
    ino: int
    generation: int
    size_bytes: int
    base_bytes: int
    tracks_extents: int
    path: str
    base: ObjectMeta | None


class Extent(NamedTuple):
    """A range of a file that tracks extents was written, which made this generation."""

    number: int
    offset: int
    length: int
    generation: int


class Ranges(NamedTuple):
    """Written ranges of a file when the journal is written anew: `bounds` has the begin and the end
    of each. They don't change the file's size."""

    number: int
    bounds: "array[int]"


class Truncate(NamedTuple):
    """A file that tracks extents got another size."""

    number: int
    size_bytes: int
    generation: int


class Attributes(NamedTuple):
    """A user set attributes. `mtime_ns` holds while the spool file has the mtime
    `spool_mtime_ns`; a later write gives the file the spool file's mtime."""

    number: int
    mtime_ns: int
    spool_mtime_ns: int
    posix: Posix


class Renamed(NamedTuple):
    """A file got another path, relative to the mounted prefix."""

    number: int
    path: str


class Changed(NamedTuple):
    """The content changes after it was sealed or synced: neither holds any longer."""

    number: int
    generation: int


class Sealed(NamedTuple):
    """A user closed or synced the file, so that it may be published."""

    number: int
    generation: int


class Synced(NamedTuple):
    """The bytes of a generation are on the disk. Size and mtime are those of the spool file."""

    number: int
    generation: int
    spool_bytes: int
    spool_mtime_ns: int


class UploadStarted(NamedTuple):
    """An upload to this path began. `upload_id` is "" for one that is a single request. `write_id`
    names the write, so that its result can be recognised at the origin."""

    number: int
    upload_id: str
    write_id: str
    path: str


class PartDone(NamedTuple):
    """The origin has a part: a range of the file as it was in a generation, and the part's tag."""

    number: int
    part: int
    offset: int
    length: int
    generation: int
    tag: str


class PartsStale(NamedTuple):
    """The content of these parts changes, so the origin's parts are no longer right."""

    number: int
    parts: tuple[int, ...]


class UploadEnded(NamedTuple):
    """The upload was aborted, or is of no use any more."""

    number: int


class Done(NamedTuple):
    """The content is at the origin as this version. The file is no longer staged."""

    number: int
    generation: int
    meta: ObjectMeta


class Rebased(NamedTuple):
    """An older generation is at the origin as the version `meta`, which is the new base of a file
    that tracks extents. Another file still has its whole content in the spool file, and no base."""

    number: int
    generation: int
    base_bytes: int
    meta: ObjectMeta


class Dropped(NamedTuple):
    """The file was unlinked, or a user dropped it. It is no longer staged."""

    number: int


class StateChanged(NamedTuple):
    """The file is in this state (`staging/file_state.py`), for this reason."""

    number: int
    state: int
    reason: str


class Exclusive(NamedTuple):
    """Whether the file may be published only if the origin has nothing of its name (0 or 1)."""

    number: int
    is_exclusive: int


class Completing(NamedTuple):
    """The origin is asked to make the object of its parts. From now on it may have done so, and
    then it has the content of this generation."""

    number: int
    generation: int


class Starting(NamedTuple):
    """The origin is asked to begin an upload in parts for the write `write_id`, at this time. It
    may have done so until an `UploadStarted` follows. `at_ns` is 0 if no such upload is left."""

    number: int
    at_ns: int
    write_id: str
    path: str


class Expected(NamedTuple):
    """The version that the origin had of the name when the change began, "" for none. Of a file
    that has a base it is the base's until such a record."""

    number: int
    version: str


class SentFor(NamedTuple):
    """The file is sent with the rights of this process, which created it, or else closed it: see
    `types.Caller`."""

    number: int
    uid: int
    gid: int
    capabilities: int
    groups: tuple[int, ...]


class Refused(NamedTuple):
    """A write at `offset` was refused, so the content is not what a program wanted to write.
    `NONE_REFUSED`: it was repeated, or cut off."""

    number: int
    offset: int


class Freed(NamedTuple):
    """The spool file has no bytes before `end_bytes` any more: only the parts of the upload have
    them. 0 after the file was truncated to nothing."""

    number: int
    end_bytes: int


Record: TypeAlias = (
    Begin
    | Extent
    | Ranges
    | Truncate
    | Attributes
    | Renamed
    | Changed
    | Sealed
    | Synced
    | UploadStarted
    | PartDone
    | PartsStale
    | UploadEnded
    | Done
    | Rebased
    | Dropped
    | StateChanged
    | Exclusive
    | Completing
    | Starting
    | Expected
    | SentFor
    | Refused
    | Freed
)


def encode_payload(record: Record) -> tuple[int, int, bytes]:
    """Return kind, flags and payload of a record.

    Raises `struct.error` or `ValueError` for a value that doesn't fit its field."""
    layout = _LAYOUT_OF[type(record)]
    payload: bytes = layout.fixed.pack(*record[: layout.fixed_count])
    for code, value in zip(layout.codes, record[layout.fixed_count :], strict=True):
        payload += _PACK[code](value)
    return layout.kind, layout.flags, payload


def decode_payload(kind: int, payload: bytes) -> Record | None:
    """Return the record, or None for a kind that this version doesn't know.

    Raises `BadRecordError` if a value is impossible. What follows the known fields is ignored."""
    layout = _LAYOUT_OF_KIND.get(kind)
    if layout is None:
        return None
    try:
        fields: list[Any] = list(layout.fixed.unpack_from(payload))
        offset = layout.fixed.size
        for code in layout.codes:
            value, offset = _UNPACK[code](payload, offset)
            fields.append(value)
        record: Record = layout.record(*fields)
        _check(record)
    except (struct.error, ValueError) as error:
        raise BadRecordError(f"a record of kind {kind} is invalid") from error
    return record


def _check(record: Record) -> None:
    """Raise `BadRecordError` if the values of a record contradict each other."""
    match record:
        case Begin(base=base, base_bytes=base_bytes, tracks_extents=tracks):
            most = base.size_bytes if base is not None and tracks else 0
            if tracks > 1 or (base is not None and not tracks) or base_bytes > most:
                raise BadRecordError("an impossible base")
            _check_sizes(record.size_bytes, base_bytes)
        case Extent(offset=offset, length=length):
            _check_sizes(offset + length)
            if not length:
                raise BadRecordError("an empty range")
        case Ranges(bounds=bounds):
            if len(bounds) % 2 or any(
                a >= b for a, b in zip(bounds[::2], bounds[1::2], strict=True)
            ):
                raise BadRecordError("impossible ranges")
            _check_sizes(0, *bounds)
        case Truncate(size_bytes=size_bytes):
            _check_sizes(size_bytes)
        case Freed(end_bytes=end_bytes):
            _check_sizes(end_bytes)
        case Exclusive(is_exclusive=is_exclusive):
            if is_exclusive > 1:
                raise BadRecordError("neither true nor false")
        case PartDone(offset=offset, length=length):
            _check_sizes(offset + length)
        case Rebased(base_bytes=base_bytes, meta=meta):
            if base_bytes > meta.size_bytes:
                raise BadRecordError("an impossible base")
        case _:
            pass


def _check_sizes(*sizes_bytes: int) -> None:
    if max(sizes_bytes) > MOST_SIZE_BYTES:
        raise BadRecordError("an impossible size")


# -- fields ---------------------------------------------------------------------------------

_LENGTH = Struct("<H")
_MOST_TEXT_BYTES = (1 << 16) - 1
_POSIX = Struct("<IIH")
_META = Struct("<Qq")


def _pack_text(text: str) -> bytes:
    """Return a text with its length. Raises `OSError` if it is longer than a record can hold, such
    as the path of a file in 300 directories with long names."""
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > _MOST_TEXT_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return _LENGTH.pack(len(data)) + data


def _unpack_text(payload: bytes, offset: int) -> tuple[str, int]:
    end = offset + _LENGTH.size + _LENGTH.unpack_from(payload, offset)[0]
    if end > len(payload):
        raise BadRecordError("a text is cut")
    return payload[offset + _LENGTH.size : end].decode("utf-8", "surrogateescape"), end


def _pack_posix(posix: Posix) -> bytes:
    return _POSIX.pack(*posix)


def _unpack_posix(payload: bytes, offset: int) -> tuple[Posix, int]:
    posix = Posix(*_POSIX.unpack_from(payload, offset))
    if posix.mode > MOST_MODE and posix.mode != UNKNOWN_MODE:
        raise BadRecordError("an impossible mode")
    return posix, offset + _POSIX.size


def _pack_meta(meta: ObjectMeta) -> bytes:
    fixed = _META.pack(meta.size_bytes, storable_ns(meta.mtime_ns))
    return fixed + _pack_posix(meta.posix) + _pack_text(meta.version)


def _unpack_meta(payload: bytes, offset: int) -> tuple[ObjectMeta, int]:
    size_bytes, mtime_ns = _META.unpack_from(payload, offset)
    _check_sizes(size_bytes)
    posix, offset = _unpack_posix(payload, offset + _META.size)
    version, offset = _unpack_text(payload, offset)
    return ObjectMeta(size_bytes, mtime_ns, version, posix), offset


def _pack_optional_meta(meta: ObjectMeta | None) -> bytes:
    return b"\0" if meta is None else b"\1" + _pack_meta(meta)


def _unpack_optional_meta(payload: bytes, offset: int) -> tuple[ObjectMeta | None, int]:
    if offset >= len(payload) or payload[offset] > 1:
        raise BadRecordError("a version is cut")
    return _unpack_meta(payload, offset + 1) if payload[offset] else (None, offset + 1)


def _pack_bounds(bounds: "array[int]") -> bytes:
    if sys.byteorder == "big":
        bounds = bounds[:]
        bounds.byteswap()
    return struct.pack("<I", len(bounds)) + bounds.tobytes()


def _unpack_bounds(payload: bytes, offset: int) -> tuple["array[int]", int]:
    (count,) = struct.unpack_from("<I", payload, offset)
    if count > 2 * RANGES_PER_RECORD:
        raise BadRecordError("too many ranges")
    bounds = array("Q", struct.unpack_from(f"<{count}Q", payload, offset + 4))
    return bounds, offset + 4 + 8 * count


def _pack_parts(parts: tuple[int, ...]) -> bytes:
    return struct.pack(f"<I{len(parts)}I", len(parts), *parts)


def _unpack_parts(payload: bytes, offset: int) -> tuple[tuple[int, ...], int]:
    (count,) = struct.unpack_from("<I", payload, offset)
    if count > PARTS_PER_RECORD:
        raise BadRecordError("too many parts")
    return struct.unpack_from(f"<{count}I", payload, offset + 4), offset + 4 + 4 * count


def _pack_groups(groups: tuple[int, ...]) -> bytes:
    return struct.pack(f"<I{len(groups)}I", len(groups), *groups)


def _unpack_groups(payload: bytes, offset: int) -> tuple[tuple[int, ...], int]:
    (count,) = struct.unpack_from("<I", payload, offset)
    if count > MOST_GROUPS:
        raise BadRecordError("too many groups")
    return struct.unpack_from(f"<{count}I", payload, offset + 4), offset + 4 + 4 * count


_PACK: dict[str, Callable[[Any], bytes]] = {
    "text": _pack_text,
    "posix": _pack_posix,
    "meta": _pack_meta,
    "meta?": _pack_optional_meta,
    "bounds": _pack_bounds,
    "parts": _pack_parts,
    "groups": _pack_groups,
}
_UNPACK: dict[str, Callable[[bytes, int], tuple[Any, int]]] = {
    "text": _unpack_text,
    "posix": _unpack_posix,
    "meta": _unpack_meta,
    "meta?": _unpack_optional_meta,
    "bounds": _unpack_bounds,
    "parts": _unpack_parts,
    "groups": _unpack_groups,
}


class _Layout(NamedTuple):
    """How a record is stored: numbers first, with one `struct`, then the other fields."""

    record: type[Any]
    kind: int
    flags: int
    fixed: Struct
    fixed_count: int
    codes: tuple[str, ...]


def _layout(
    record: type[Any], kind: int, numbers: str, *codes: str, flags: int = REQUIRED
) -> _Layout:
    return _Layout(record, kind, flags, Struct("<" + numbers), len(numbers), codes)


_LAYOUTS = (
    _layout(Begin, 1, "QQQQQB", "text", "meta?"),
    _layout(Extent, 2, "QQQQ"),
    _layout(Ranges, 3, "Q", "bounds"),
    _layout(Truncate, 4, "QQQ"),
    _layout(Attributes, 5, "Qqq", "posix"),
    _layout(Renamed, 6, "Q", "text"),
    _layout(Changed, 7, "QQ"),
    _layout(Sealed, 8, "QQ"),
    _layout(Synced, 9, "QQQq", flags=0),
    _layout(UploadStarted, 10, "Q", "text", "text", "text"),
    _layout(PartDone, 11, "QIQQQ", "text"),
    _layout(PartsStale, 12, "Q", "parts"),
    _layout(UploadEnded, 13, "Q"),
    _layout(Done, 14, "QQ", "meta"),
    _layout(Rebased, 15, "QQQ", "meta"),
    _layout(Dropped, 16, "Q"),
    _layout(StateChanged, 17, "QB", "text"),
    _layout(Exclusive, 19, "QB"),
    _layout(Completing, 20, "QQ"),
    _layout(Starting, 21, "QQ", "text", "text", flags=0),
    _layout(Expected, 22, "Q", "text"),
    _layout(SentFor, 23, "QIIQ", "groups", flags=0),
    _layout(Refused, 24, "QQ"),
    _layout(Freed, 25, "QQ"),
)
_LAYOUT_OF = {layout.record: layout for layout in _LAYOUTS}
_LAYOUT_OF_KIND = {layout.kind: layout for layout in _LAYOUTS}
