"""Read and write the files of `cachefs metadata`. Format 1; see docs/formats/metadata.md.

The writer works by row groups and the reader by batches of rows. In between, the reader keeps
only the listing times of directories whose entries it has not reached yet.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError, UntrustedPathError, UsageError
from cachefs.manifest.writer import replacing
from cachefs.trusted_path import open_file
from cachefs.types import UNKNOWN_ID, UNKNOWN_MODE

METADATA_FORMAT = 1
COLUMNS = (
    ("path", "string"),
    ("kind", "string"),
    ("size", "int64"),
    ("mtime_ns", "int64"),
    ("version", "string"),
    ("uid", "uint32"),
    ("gid", "uint32"),
    ("mode", "uint16"),
    ("checked_at_ns", "int64"),
    ("listed_at_ns", "int64"),
    ("entry_count", "int64"),
)
_GROUP_ROWS = 100_000
_BATCH_ROWS = 10_000
_REQUEST_BYTES = 700_000
"""The rough upper limit of a request to the daemon, which accepts 1 MiB."""
_KINDS = ("file", "dir")

Entry = list[Any]
"""The fields of a `namespace.transfer.KnownEntry`, in its order."""
Piece = dict[str, Any]


class MetadataWriter:
    """Writes the pieces that a daemon sends to a file."""

    def __init__(self, stream: Any, head: dict[str, Any]) -> None:
        import pyarrow
        from pyarrow import parquet

        fields = [(name, getattr(pyarrow, kind)()) for name, kind in COLUMNS]
        about = {
            "cachefs.metadata": str(METADATA_FORMAT),
            "cachefs.identity": head["identity"],
            "cachefs.source": head["source"],
            "cachefs.exported_at_ns": str(head["exported_at_ns"]),
        }
        self._arrow: Any = pyarrow
        self._schema = pyarrow.schema(fields, about)
        self._writer: Any = parquet.ParquetWriter(stream, self._schema, compression="zstd")
        self._rows: list[tuple[Any, ...]] = []
        self.count = 0
        if head["root"] is not None:
            self._add("", head["root"])

    @classmethod
    @contextmanager
    def open(cls, file: Path, head: dict[str, Any]) -> Iterator["MetadataWriter"]:
        """Create `file` when the context ends without an error. Raises `CachefsError`."""
        try:
            with replacing(file) as stream, closing(cls(stream, head)) as writer:
                yield writer
        except OSError as error:
            raise CachefsError(f"can't write {file}: {error.strerror or error}") from error

    def add(self, piece: Piece) -> None:
        prefix = piece["path"] + "/" if piece["path"] else ""
        for entry in piece["entries"]:
            self._add(prefix + entry[0], entry)
        if len(self._rows) >= _GROUP_ROWS:
            self._flush()

    def _add(self, path: str, entry: Entry) -> None:
        _, is_dir, size, mtime_ns, version, uid, gid, mode, checked, listed, count = entry
        self._rows.append((
            path, _KINDS[is_dir], size, mtime_ns, version,
            None if uid == UNKNOWN_ID else uid,
            None if gid == UNKNOWN_ID else gid,
            None if mode == UNKNOWN_MODE else mode,
            checked, listed, count,
        ))  # fmt: skip
        self.count += 1

    def close(self) -> None:
        """Write the remaining rows and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            arrays = [
                self._arrow.array(column, field.type)
                for column, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
            ]
            self._writer.write_batch(self._arrow.record_batch(arrays, schema=self._schema))
            self._rows = []


class MetadataReader:
    """Reads a file back as pieces. `done` counts the rows read."""

    def __init__(self, file: Path, parquet_file: Any) -> None:
        self._name = str(file)
        self._file = parquet_file
        about = parquet_file.schema_arrow.metadata or {}
        version = about.get(b"cachefs.metadata", b"").decode("ascii", "replace")
        missing = [name for name, _ in COLUMNS if name not in parquet_file.schema_arrow.names]
        if not version or missing or b"cachefs.identity" not in about:
            raise UsageError(f"{file} was not written by cachefs metadata export")
        if version != str(METADATA_FORMAT):
            raise UsageError(f"{file} has format {version}; this cachefs knows {METADATA_FORMAT}")
        for name, kind in COLUMNS:
            _check_column(file, parquet_file.schema_arrow, name, kind)
        self.identity = about[b"cachefs.identity"].decode("utf-8", "replace")
        self.count: int = parquet_file.metadata.num_rows
        self.done = 0
        self._rows = self._all_rows()
        self._first = next(self._rows, None)
        self.root: Entry | None = None
        self._listed: dict[str, tuple[int, int]] = {}
        """For each completely known directory whose entries have not been read yet: its listing
        time in ns and its number of entries."""
        if self._first is not None and self._first[0] == "":
            self.root = self._first[1]
            self._note_listing("", self._first[1])
            self._first = None

    @classmethod
    @contextmanager
    def open(cls, file: Path) -> Iterator["MetadataReader"]:
        """Open `file` for reading. This and the iterators raise `CachefsError`."""
        import pyarrow
        from pyarrow import parquet

        try:
            with os.fdopen(open_file(file), "rb") as stream:
                opened = f"/proc/self/fd/{stream.fileno()}"
                with parquet.ParquetFile(opened, memory_map=False) as source:
                    yield cls(file, source)
        except UntrustedPathError as error:
            raise CachefsError(f"can't read {file}: {error}") from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
            raise CachefsError(f"can't read {file}: {reason}") from error
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            text = str(error).partition("\n")[0]
            raise UsageError(f"{file} is no Parquet that can be read: {text}") from None

    def _all_rows(self) -> Iterator[tuple[str, Entry]]:
        columns = [name for name, _ in COLUMNS]
        for batch in self._file.iter_batches(_BATCH_ROWS, columns=columns):
            try:
                values = [batch.column(name).to_pylist() for name in columns]
            except ValueError as error:
                raise UsageError(f"{self._name}: a text is no UTF-8") from error
            for row in zip(*values, strict=True):
                path, kind, size, mtime_ns, version, uid, gid, mode, *times = row
                self.done += 1
                if path is None or kind not in _KINDS:
                    raise UsageError(f"{self._name}, row {self.done}: no path, or no kind")
                yield path, [
                    path.rpartition("/")[2], kind == "dir", size, mtime_ns, version,
                    UNKNOWN_ID if uid is None else uid,
                    UNKNOWN_ID if gid is None else gid,
                    UNKNOWN_MODE if mode is None else mode,
                    *times,
                ]  # fmt: skip

    def _note_listing(self, path: str, entry: Entry) -> None:
        listed_at_ns, entry_count = entry[-2:]
        if entry[1] and listed_at_ns is not None and entry_count is not None:
            self._listed[path] = (listed_at_ns, entry_count)

    def pieces(self) -> Iterator[list[Piece]]:
        """Yield lists of pieces, each list as large as one request allows."""
        request: list[Piece] = []
        size_bytes = 0
        for piece, piece_bytes in self._pieces():
            if size_bytes + piece_bytes > _REQUEST_BYTES and request:
                yield request
                request, size_bytes = [], 0
            request.append(piece)
            size_bytes += piece_bytes
        if request:
            yield request

    def _pieces(self) -> Iterator[tuple[Piece, int]]:
        piece: Piece | None = None
        left: int | None = None
        size_bytes = 0
        empty = [""] if self._listed.get("", (0, 1))[1] == 0 else []
        yield from self._empty(empty)
        for path, entry in self._rows if self._first is None else _chain(self._first, self._rows):
            above = path.rpartition("/")[0]
            if piece is None or piece["path"] != above:
                if piece is not None:
                    yield piece, size_bytes
                    yield from self._empty(empty)
                listed_at_ns, left = self._listed.pop(above, (None, None))
                piece, size_bytes = _piece(above, "", listed_at_ns), 200 + 6 * len(above)
            elif size_bytes > _REQUEST_BYTES // 2:
                yield piece, size_bytes
                yield from self._empty(empty)
                after = piece["entries"][-1][0]
                piece = _piece(above, after, piece["listed_at_ns"])
                size_bytes = 200 + 6 * len(above)
            piece["entries"].append(entry)
            name_bytes = len(entry[0])
            if not entry[0].isascii():
                name_bytes *= 6  # JSON writes \uXXXX
            size_bytes += 150 + name_bytes + len(entry[4] or "")
            if left is not None:
                left -= 1
                piece["is_last"] = left == 0
            self._note_listing(path, entry)
            if self._listed.get(path, (0, 1))[1] == 0:
                empty.append(path)
        if piece is not None:
            yield piece, size_bytes
            yield from self._empty(empty)

    def _empty(self, paths: list[str]) -> Iterator[tuple[Piece, int]]:
        """Yield a piece for each directory in `paths`, all known to be empty: no row of the file
        names an entry of them. Clears `paths`, which has a directory twice if the file has."""
        for path in dict.fromkeys(paths):
            listed_at_ns, _ = self._listed.pop(path)
            yield {**_piece(path, "", listed_at_ns), "is_last": True}, 200 + 6 * len(path)
        paths.clear()


def _check_column(file: Path, schema: Any, name: str, kind: str) -> None:
    from pyarrow import types

    if schema.names.count(name) > 1:
        raise UsageError(f"{file} has the column {name} twice")
    found = schema.field(name).type
    is_text = types.is_string(found) or types.is_large_string(found)
    if not (is_text if kind == "string" else types.is_integer(found)):
        raise UsageError(f"{file}: the column {name} is of {found}, and should be of {kind}")


def _chain(first: tuple[str, Entry], rest: Iterator[tuple[str, Entry]]) -> Iterator[Any]:
    yield first
    yield from rest


def _piece(path: str, after: str, listed_at_ns: int | None) -> Piece:
    return {
        "path": path,
        "after": after,
        "is_last": False,
        "listed_at_ns": listed_at_ns,
        "entries": [],
    }
