"""Read manifest files: Parquet, or lines of paths or JSON objects. See docs/formats/manifest.md.

Parquet is recognized by the first bytes of the file, not by its name. All functions block.
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from cachefs.errors import CachefsError, UsageError
from cachefs.origin.names import is_encodable
from cachefs.trusted_path import open_file
from cachefs.types import MOST_MODE, NO_POSIX, UNKNOWN_ID, UNKNOWN_MODE, ObjectMeta, Posix

FIELDS = ("path", "size", "mtime_ns", "version", "uid", "gid", "mode")
"""Columns of Parquet, and keys of JSON. Only `path` is required. `size`, `mtime_ns` and `version`
count only together; the last three are owner, group and mode, where known."""

_MAGIC = b"PAR1"
_LINE_BYTES = 1 << 16
_BATCH_ROWS = 10_000
_MOST_BYTES = 1 << 62
_ERROR_CHARACTERS = 200

Fields = tuple[object, ...]
"""Values of `FIELDS`, in that order; only the first for a line that is a path; () if empty."""


class Listed(NamedTuple):
    """One file of a manifest. `meta` is None if its size, time or version is missing."""

    path: str
    meta: ObjectMeta | None


def read_manifest(file: Path, name: str, path_of: Callable[[str], str]) -> Iterator[Listed]:
    """Yield the files of a manifest in their order.

    Errors call the manifest `name`. `path_of` makes a path relative to the source. Raises
    `UsageError`, with line or row, for content that is not valid, and `CachefsError` for a file
    that cannot be read.
    """
    unit, number = "line", 0
    try:
        with os.fdopen(open_file(file), "rb") as stream:
            is_parquet = stream.read(len(_MAGIC)) == _MAGIC
            stream.seek(0)
            rows: Iterator[tuple[int, bytes | Fields]] = _lines(stream)
            if is_parquet:
                unit, rows = "row", _parquet_rows(Path(f"/proc/self/fd/{stream.fileno()}"))
            for number, row in rows:  # noqa: B007 - used when the next fails
                fields = _fields_of_line(row) if isinstance(row, bytes) else row
                if fields:
                    yield _listed(fields, path_of)
    except UsageError as error:
        text = str(error)
        text = text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}..."
        where = f"{unit} {number}" if number else "at its beginning"
        raise UsageError(f"manifest {name}, {where}: {text}") from None
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise CachefsError(f"can't read the manifest {name}: {reason}") from error


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    return enumerate(iter(partial(stream.readline, _LINE_BYTES), b""), 1)


def _fields_of_line(line: bytes) -> Fields:
    """Return the fields of a line; () for an empty line. Raises `UsageError`."""
    if len(line) == _LINE_BYTES:
        raise UsageError(f"a line of more than {_LINE_BYTES >> 10} KiB is no path")
    line = line.rstrip(b"\r\n")
    if line.startswith(b"{"):
        return _fields_of_json(line)
    if b"\0" in line:
        raise UsageError("there is a zero byte; this is neither text nor Parquet")
    return (line.decode("utf-8", "surrogateescape"),) if line else ()


def _fields_of_json(line: bytes) -> Fields:
    try:
        values = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{line[:60]!r} is no JSON: {error}") from None
    return tuple(map(values.get, FIELDS))


def _parquet_rows(file: Path) -> Iterator[tuple[int, Fields]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file, memory_map=False) as source:
            names = source.schema_arrow.names
            present = [field for field in FIELDS if field in names]
            if "path" not in present:
                raise UsageError(f'it has no column "path", only {names}')
            if any(names.count(field) > 1 for field in present):
                raise UsageError(f"it has a column twice: {names}")
            first = 1
            for batch in source.iter_batches(_BATCH_ROWS, columns=present):
                columns: list[list[Any]] = [
                    batch.column(field).to_pylist() if field in present else [None] * batch.num_rows
                    for field in FIELDS
                ]
                yield from enumerate(zip(*columns, strict=True), first)
                first += batch.num_rows
    except (pyarrow.ArrowException, ArithmeticError, LookupError, ValueError) as error:
        # These include text that is not UTF-8, and times that Python cannot represent.
        text = str(error).partition("\n")[0]
        raise UsageError(f"it is no Parquet that can be read: {text}") from None


def _listed(fields: Fields, path_of: Callable[[str], str]) -> Listed:
    written = fields[0]
    if not isinstance(written, str):
        raise UsageError('there is no "path"')
    path = path_of(written)
    if not path:
        raise UsageError(f"{written!r} is the source itself, and no file of it")
    if len(fields) == 1:
        return Listed(path, None)
    _, size_bytes, mtime_ns, version, uid, gid, mode = fields
    posix = NO_POSIX if uid is gid is mode is None else _posix(uid, gid, mode)
    if (
        type(size_bytes) is int
        and type(mtime_ns) is int
        and type(version) is str
        and version
        and version.isascii()
        and 0 <= size_bytes <= _MOST_BYTES > abs(mtime_ns)
    ):  # a fast path for almost all files, because there may be millions
        return Listed(path, ObjectMeta(size_bytes, mtime_ns, version, posix))
    size = _number("size", size_bytes, 0, _MOST_BYTES, -1)
    time = _number("mtime_ns", mtime_ns, -_MOST_BYTES, _MOST_BYTES, _MOST_BYTES)
    if version is not None and not isinstance(version, str):
        raise UsageError(f"version: {version!r} is no text")
    if version and not is_encodable(version):
        raise UsageError(f"version: {version!r} is not valid Unicode")
    if size < 0 or time == _MOST_BYTES or not version:
        return Listed(path, None)
    return Listed(path, ObjectMeta(size, time, version, posix))


def _posix(uid: object, gid: object, mode: object) -> Posix:
    return Posix(
        _number("uid", uid, 0, UNKNOWN_ID - 1, UNKNOWN_ID),
        _number("gid", gid, 0, UNKNOWN_ID - 1, UNKNOWN_ID),
        _number("mode", mode, 0, MOST_MODE, UNKNOWN_MODE),
    )


def _number(field: str, value: object, least: int, most: int, otherwise: int) -> int:
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{field}: {value!r} is no whole number from {least} to {most}")
    return value
