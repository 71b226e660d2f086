"""Write manifest files, with few rows in memory at a time. See docs/formats/manifest.md."""

import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from cachefs.errors import CachefsError, UsageError
from cachefs.format.manifest_record import MANIFEST_FORMAT
from cachefs.manifest.files import FIELDS
from cachefs.trusted_path import open_place
from cachefs.types import UNKNOWN_ID, UNKNOWN_MODE, ObjectMeta

_BATCH_ROWS = 10_000
_BATCHES_PER_GROUP = 10
PARQUET_SUFFIX = ".parquet"


class ManifestWriter(Protocol):
    """Receives the files of a manifest one by one. `count` is the number of files so far."""

    count: int

    def add(self, path: str, meta: ObjectMeta) -> None:
        """Add one file. Raises `OSError`, and `UsageError` for a path that the format cannot
        hold."""


class _Lines:
    """Writes JSON objects, one per line."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.count = 0

    def add(self, path: str, meta: ObjectMeta) -> None:
        values = {name: value for name, value in zip(FIELDS, _values(path, meta), strict=True)
                  if value is not None}  # fmt: skip
        self._stream.write(json.dumps(values).encode() + b"\n")
        self.count += 1


class _Parquet:
    def __init__(self, stream: IO[bytes], source: str) -> None:
        import pyarrow
        from pyarrow import parquet

        kinds = ("string", "int64", "int64", "string", "uint32", "uint32", "uint16")
        schema = pyarrow.schema(
            [(name, getattr(pyarrow, kind)()) for name, kind in zip(FIELDS, kinds, strict=True)],
            {"cachefs.manifest": str(MANIFEST_FORMAT), "cachefs.source": source},
        )
        self._arrow: Any = pyarrow
        self._schema = schema
        self._writer: Any = parquet.ParquetWriter(stream, schema, compression="zstd")
        self._rows: list[tuple[Any, ...]] = []
        self.count = 0

    def add(self, path: str, meta: ObjectMeta) -> None:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{path!r} is no UTF-8, which Parquet needs; write another format than .parquet"
            ) from None
        self._rows.append(_values(path, meta))
        self.count += 1
        if len(self._rows) == _BATCH_ROWS * _BATCHES_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [
                self._arrow.array(column, field.type)
                for column, field in zip(columns, self._schema, strict=True)
            ]
            self._writer.write_batch(self._arrow.record_batch(arrays, schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self.flush()
        self._writer.close()


def _values(path: str, meta: ObjectMeta) -> tuple[Any, ...]:
    uid, gid, mode = meta.posix
    return (
        path,
        meta.size_bytes,
        meta.mtime_ns,
        meta.version,
        None if uid == UNKNOWN_ID else uid,
        None if gid == UNKNOWN_ID else gid,
        None if mode == UNKNOWN_MODE else mode,
    )


@contextmanager
def manifest_writer(file: str, source: str) -> Iterator[ManifestWriter]:
    """Yield a writer for `file`; "-" is the standard output. The format is Parquet if the name ends
    with `.parquet`, else JSON lines. The file appears only when the context ends without an
    error. Raises `CachefsError`.
    """
    try:
        if file == "-":
            with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as stream:
                yield _Lines(stream)
            return
        with replacing(Path(file)) as stream:
            if not file.endswith(PARQUET_SUFFIX):
                yield _Lines(stream)
                return
            with closing(_Parquet(stream, source)) as writer:
                yield writer
    except BrokenPipeError:
        raise
    except OSError as error:
        what = "the output can't be written" if file == "-" else f"can't write {file}"
        raise CachefsError(f"{what}: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream whose content replaces `path` when the context ends without an error. Raises
    `OSError`.

    Other users may be able to write into the directory. So the name of the temporary file is
    random, a file that exists already is never opened, and both names are in the one directory that
    `path` led to at the beginning.
    """
    temporary = f".{path.name[:200]}.{secrets.token_hex(8)}.tmp"
    place_fd = open_place(path.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=place_fd), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path.name, src_dir_fd=place_fd, dst_dir_fd=place_fd)
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(temporary, dir_fd=place_fd)
        os.close(place_fd)
