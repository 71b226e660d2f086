"""Files of `cachefs metadata`: docs/formats/metadata.md."""

import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from cachefs.cli.files.metadata_file import COLUMNS, MetadataReader, MetadataWriter
from cachefs.cli.metadata import ahead
from cachefs.errors import CachefsError, UsageError

NONE, NO_MODE = (1 << 32) - 1, (1 << 16) - 1
ROOT = ["", True, 0, 7, "", NONE, NONE, NO_MODE, 0, 100, 2]
HEAD = {
    "identity": "s3+host://bucket/data",
    "source": "s3://bucket/data",
    "exported_at_ns": 200,
    "entries": 4,
    "root": ROOT,
}


def directory(name: str, listed_at_ns: int | None, count: int | None) -> list[Any]:
    return [name, True, 0, 8, "", 1000, 100, 0o750, 100, listed_at_ns, count]


def file(name: str) -> list[Any]:
    return [name, False, 5, 9, "etag", NONE, NONE, NO_MODE, 100, None, None]


def piece(path: str, entries: list[Any], listed_at_ns: int | None = 100) -> dict[str, Any]:
    return {
        "path": path,
        "after": "",
        "is_last": listed_at_ns is not None,
        "listed_at_ns": listed_at_ns,
        "entries": entries,
    }


PIECES = [
    piece("", [directory("a", 101, 2), file("ü")]),
    piece("a", [directory("empty", 102, 0), directory("part", None, None)], 101),
    piece("a/empty", [], 102),
    piece("a/part", [file("x")], None),
]


def write(path: Path, pieces: list[dict[str, Any]], head: dict[str, Any] = HEAD) -> None:
    with MetadataWriter.open(path, head) as writer:
        for one in pieces:
            writer.add(one)


def test_pieces_come_back_as_they_went(tmp_path: Path) -> None:
    write(tmp_path / "f", PIECES)
    with MetadataReader.open(tmp_path / "f") as reader:
        assert (reader.identity, reader.count, reader.root) == (HEAD["identity"], 6, ROOT)
        assert [one for request in reader.pieces() for one in request] == PIECES
        assert reader.done == 6


def test_the_golden_file(tmp_path: Path) -> None:
    write(tmp_path / "f", PIECES)
    table = parquet.read_table(tmp_path / "f")
    assert [(field.name, str(field.type)) for field in table.schema] == list(COLUMNS) == [
        ("path", "string"), ("kind", "string"), ("size", "int64"), ("mtime_ns", "int64"),
        ("version", "string"), ("uid", "uint32"), ("gid", "uint32"), ("mode", "uint16"),
        ("checked_at_ns", "int64"), ("listed_at_ns", "int64"), ("entry_count", "int64"),
    ]  # fmt: skip
    about = {k: v for k, v in table.schema.metadata.items() if k.startswith(b"cachefs.")}
    assert about == {
        b"cachefs.metadata": b"1",
        b"cachefs.identity": b"s3+host://bucket/data",
        b"cachefs.source": b"s3://bucket/data",
        b"cachefs.exported_at_ns": b"200",
    }
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert rows == [
        ("", "dir", 0, 7, "", None, None, None, 0, 100, 2),
        ("a", "dir", 0, 8, "", 1000, 100, 0o750, 100, 101, 2),
        ("ü", "file", 5, 9, "etag", None, None, None, 100, None, None),
        ("a/empty", "dir", 0, 8, "", 1000, 100, 0o750, 100, 102, 0),
        ("a/part", "dir", 0, 8, "", 1000, 100, 0o750, 100, None, None),
        ("a/part/x", "file", 5, 9, "etag", None, None, None, 100, None, None),
    ]


def test_an_empty_root(tmp_path: Path) -> None:
    root = [*ROOT[:-1], 0]
    write(tmp_path / "f", [piece("", [])], {**HEAD, "root": root})
    with MetadataReader.open(tmp_path / "f") as reader:
        assert list(reader.pieces()) == [[piece("", [])]]


def test_large_directories_come_in_requests_that_the_daemon_takes(tmp_path: Path) -> None:
    count = 20_000
    entries = [file(f"{number:06}-{'文' * 60}") for number in range(count)]
    write(tmp_path / "f", [piece("", entries)], {**HEAD, "root": [*ROOT[:-1], count]})
    found: list[Any] = []
    with MetadataReader.open(tmp_path / "f") as reader:
        for request in reader.pieces():
            assert len(str(request).encode("ascii", "backslashreplace")) < 1 << 20
            for one in request:
                assert one["after"] == (found[-1][0] if found else "")
                assert one["is_last"] == (len(found) + len(one["entries"]) == count)
                found += one["entries"]
    assert found == entries


def test_a_file_that_was_cut_completes_no_directory(tmp_path: Path) -> None:
    write(tmp_path / "f", PIECES)
    table = parquet.read_table(tmp_path / "f")
    parquet.write_table(table.slice(0, 4), tmp_path / "g")
    with MetadataReader.open(tmp_path / "g") as reader:
        pieces = [one for request in reader.pieces() for one in request]
    assert [(one["path"], one["is_last"]) for one in pieces] == [
        ("", True), ("a", False), ("a/empty", True),
    ]  # fmt: skip


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"

    def refused(kind: type[CachefsError] = UsageError) -> str:
        with pytest.raises(kind) as caught, MetadataReader.open(path) as reader:
            list(reader.pieces())
        return str(caught.value)

    assert refused(CachefsError) == f"can't read {path}: No such file or directory"
    path.write_text("text")
    assert "is no Parquet that can be read" in refused()
    parquet.write_table(pyarrow.table({"path": ["a"]}), path)
    assert refused() == f"{path} was not written by cachefs metadata export"
    write(path, PIECES)
    table = parquet.read_table(path)
    other = table.schema.metadata | {b"cachefs.metadata": b"2"}
    parquet.write_table(table.replace_schema_metadata(other), path)
    assert refused() == f"{path} has format 2; this cachefs knows 1"
    kinds = pyarrow.array(["dir", "fifo", *["file"] * 4])
    parquet.write_table(table.set_column(1, "kind", kinds), path)
    assert refused() == f"{path}, row 2: no path, or no kind"


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(CachefsError, match=r"can.t write .*: No such file"):
        write(tmp_path / "no/such/f", PIECES)
    with pytest.raises(ZeroDivisionError), MetadataWriter.open(tmp_path / "f", HEAD):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_ahead() -> None:
    assert list(ahead(iter([1, 2, 3]))) == [1, 2, 3]
    assert list(ahead(iter([]))) == []
    items = ahead(1 // number for number in (1, 0))
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
