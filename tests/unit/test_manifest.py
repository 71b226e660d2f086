"""Manifest files and the table that they become: docs/formats/manifest.md, to the byte."""

import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from cachefs.config import load_mount_config
from cachefs.daemon.crash_check import check_databases
from cachefs.db import Database
from cachefs.errors import CacheDirError, CachefsError, UsageError
from cachefs.format.manifest_record import Directory, pack_row, row_key, unpack_row
from cachefs.format.paths import ManifestPaths, TierPaths
from cachefs.load.paths import PathReader
from cachefs.manifest.fetch import digest_of
from cachefs.manifest.files import Listed, read_manifest
from cachefs.manifest.table import Counts, ManifestTable, build
from cachefs.manifest.view import ManifestView
from cachefs.manifest.writer import manifest_writer, replacing
from cachefs.types import ObjectMeta, Posix

META = ObjectMeta(5, 1_700_000_000_000_000_000, "etag")
OWNED = ObjectMeta(0, -1, "v", Posix(1000, 100, 0o640))
MORE_THAN_A_ROW_GROUP = 100_002


def read(file: Path) -> list[Listed]:
    return list(read_manifest(file, "M", PathReader("/mnt", "s3://bucket/data").path))


def write(file: Path, text: str | bytes) -> Path:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def table_of(tmp_path: Path, listed: Iterable[Listed]) -> ManifestTable:
    paths = ManifestPaths(tmp_path / "manifest", "d1")
    build(paths, listed, needs_owners=False)
    return ManifestTable.open(paths.table)


# -- files ---------------------------------------------------------------------------------------


def test_lines_are_paths_or_objects(tmp_path: Path) -> None:
    lines = [
        "a/b.jpg",
        "",
        '{"path": "c", "size": 5, "mtime_ns": 1700000000000000000, "version": "etag", "x": 1}',
        '{"path": "d", "size": 5}',
        "s3://bucket/data/e",
        "/mnt/f g\r",
        (
            '{"path": "h", "size": 0, "mtime_ns": -1, "version": "v", "uid": 1000, "gid": 100, '
            '"mode": 416}'
        ),
    ]
    found = read(write(tmp_path / "m", "\n".join(lines)))
    assert [item.path for item in found] == ["a/b.jpg", "c", "d", "e", "f g", "h"]
    assert [item.meta for item in found] == [None, META, None, None, None, OWNED]
    assert found[-1].meta is not None
    assert found[-1].meta.posix == OWNED.posix


DEEP = "/".join(["d"] * 3_000)


def test_paths_may_be_thousands_of_levels_deep(tmp_path: Path) -> None:
    table = table_of(tmp_path, [Listed(DEEP + "/a", META), Listed(DEEP + "/b", META)])
    assert table.find(DEEP + "/a") == table.find(DEEP + "/b") == META
    assert isinstance(table.find(DEEP), Directory)
    with pytest.raises(KeyError):
        table.find(DEEP + "/a/b/c")
    fresh = ManifestTable(table.db)
    assert fresh.find(DEEP + "/a") == META
    table.db.close()


def test_a_path_that_no_source_has_is_not_shown(tmp_path: Path) -> None:
    paths = ManifestPaths(tmp_path / "manifest", "d1")
    found = [Listed("a", META), Listed("/".join(["d"] * 30_000), META)]
    assert build(paths, found, needs_owners=False) == Counts(1, 0, 1)


@pytest.mark.parametrize(
    "line",
    [
        '{"path": ' + "[" * 60_000,
        '{"x": ' * 10_000,
        '{"path": "a\\ud800"}',
        '{"path": "a", "version": "\\ud800", "size": 1, "mtime_ns": 1}',
    ],
)
def test_json_that_is_no_line_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="line 1: "):
        read(write(tmp_path / "m", line))


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    (tmp_path / f".m.{os.getpid()}.tmp").symlink_to(theirs)
    (tmp_path / "m").symlink_to(theirs)
    with replacing(tmp_path / "m") as stream:
        stream.write(b"mine")
    assert theirs.read_text() == "kept"
    assert not (tmp_path / "m").is_symlink()
    assert (tmp_path / "m").read_text() == "mine"


def test_names_that_are_no_utf8_are_read(tmp_path: Path) -> None:
    found = read(write(tmp_path / "m", b'caf\xe9\n{"path": "caf\\udce9"}\n'))
    assert [item.path for item in found] == ["caf\udce9", "caf\udce9"]


@pytest.mark.parametrize("name", ["m.parquet", "m.jsonl"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    with manifest_writer(str(file), "s3://bucket/data") as writer:
        for number in range(MORE_THAN_A_ROW_GROUP if name == "m.parquet" else 2):
            writer.add(f"dir/{number}", OWNED if number % 2 else META)
    assert os.listdir(tmp_path) == [name]
    found = read(file)
    assert len(found) == writer.count
    assert found[:2] == [Listed("dir/0", META), Listed("dir/1", OWNED)]
    assert found[-1] == Listed(f"dir/{writer.count - 1}", OWNED)
    assert found[1].meta is not None
    assert found[1].meta.posix == OWNED.posix


def test_the_golden_files(tmp_path: Path) -> None:
    as_lines, as_parquet = tmp_path / "m.jsonl", tmp_path / "m.parquet"
    for file in (as_lines, as_parquet):
        with manifest_writer(str(file), "s3://bucket/data") as writer:
            writer.add("a/ü", META)
            writer.add("b", OWNED)
    assert as_lines.read_text() == (
        '{"path": "a/\\u00fc", "size": 5, "mtime_ns": 1700000000000000000, "version": "etag"}\n'
        '{"path": "b", "size": 0, "mtime_ns": -1, "version": "v", "uid": 1000, "gid": 100, '
        '"mode": 416}\n'
    )
    table = parquet.read_table(as_parquet)
    assert [f"{field.name} {field.type}" for field in table.schema] == [
        "path string", "size int64", "mtime_ns int64", "version string", "uid uint32",
        "gid uint32", "mode uint16",
    ]  # fmt: skip
    assert {
        key: value for key, value in table.schema.metadata.items() if key.startswith(b"cachefs.")
    } == {b"cachefs.manifest": b"1", b"cachefs.source": b"s3://bucket/data"}
    assert table.to_pylist()[0] == {
        "path": "a/ü", "size": 5, "mtime_ns": 1_700_000_000_000_000_000, "version": "etag",
        "uid": None, "gid": None, "mode": None,
    }  # fmt: skip


def test_a_parquet_file_of_others_needs_a_path_only(tmp_path: Path) -> None:
    file = tmp_path / "names"
    parquet.write_table(pyarrow.table({"label": [1, 2], "path": ["a", "b"]}), file)
    assert read(file) == [Listed("a", None), Listed("b", None)]


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="no UTF-8"),
        manifest_writer(str(tmp_path / "m.parquet"), "") as writer,
    ):
        writer.add("a\udce9", META)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a\n../b\n", r"manifest M, line 2: '../b': .* must not contain \.\."),
        ('{"path": 5}', 'line 1: there is no "path"'),
        ('{"path": "a", "size": -1}', "line 1: size: -1 is no whole number"),
        ('{"path": "a", "size": "5"}', "line 1: size: '5' is no whole number"),
        ('{"path": "a", "version": 5}', "line 1: version: 5 is no text"),
        ('{"path": "a"', "line 1: .* is no JSON"),
        ("/elsewhere/a", "line 1: /elsewhere/a is not below /mnt"),
        ("a\n/mnt\n", "line 2: '/mnt' is the source itself"),
        ("\0ELF", "line 1: there is a zero byte"),
        ("x" * 100_000, "line 1: a line of more than 64 KiB"),
        ("PAR1 and so on", "it is no Parquet that can be read"),
    ],
)
def test_nonsense_is_named_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        read(write(tmp_path / "m", text))
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_parquet_without_paths_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m"
    parquet.write_table(pyarrow.table({"label": [1, 2]}), file)
    with pytest.raises(UsageError, match='no column "path"'):
        read(file)
    parquet.write_table(pyarrow.table({"path": ["a", None]}), file)
    with pytest.raises(UsageError, match='row 2: there is no "path"'):
        read(file)


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CachefsError, match="can't read the manifest M: No such file"):
        read(tmp_path / "absent")


def test_the_digest_is_of_the_content_and_of_what_it_means(tmp_path: Path) -> None:
    one = write(tmp_path / "1", "a\n")
    same = write(tmp_path / "2", "a\n")
    other = write(tmp_path / "3", "b\n")
    assert digest_of(one, "M", "s3://b", "/mnt") == digest_of(same, "N", "s3://b", "/mnt")
    assert digest_of(one, "M", "s3://b", "/mnt") != digest_of(other, "M", "s3://b", "/mnt")
    assert digest_of(one, "M", "s3://b", "/mnt") != digest_of(one, "M", "s3://b", "/else")
    assert digest_of(one, "M", "s3://b", "/mnt") == "ef55eefc195bf2bf287e938b08fa679b"


# -- the table -----------------------------------------------------------------------------------


def test_the_golden_rows() -> None:
    rows = {
        Directory(258): "01 0201000000000000",
        OWNED: "02 0000000000000000 ffffffffffffffff e8030000 64000000 a001 76",
        META: "02 0500000000000000 00002a36fe9c9717 ffffffff ffffffff ffff 65746167",
        None: "03",
    }
    for row, text in rows.items():
        assert pack_row(row) == bytes.fromhex(text)
        assert unpack_row(pack_row(row)) == row
    assert row_key(258, b"name").hex() == "0000000000000102" + b"name".hex()


def test_names_and_directories_of_a_table(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        [Listed("b/c/d", META), Listed("a", None), Listed("b/x", META), Listed("a", OWNED)],
    )
    assert table.counts == Counts(files=3, unknown=0, skipped=0)
    assert table.find("a") == OWNED
    assert table.find("b/c/d") == META
    below = table.find("b")
    assert isinstance(below, Directory)
    assert [name for name, _ in table.children(below.number, None, 10)] == [b"c", b"x"]
    assert [name for name, _ in table.children(0, None, 10)] == [b"a", b"b"]
    assert [name for name, _ in table.children(0, b"a", 10)] == [b"b"]
    for absent in ("c", "a/b", "b/c/d/e", "b/./x", "b//x", "n" * 256, "b/"):
        with pytest.raises(KeyError):
            table.find(absent)
    table.db.close()


def test_what_can_not_be_shown_is_counted(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        [
            Listed("file", META),
            Listed("file/below", META),  # a file of one byte wins
            Listed("empty", OWNED),
            Listed("empty/below", META),  # an empty one yields
            Listed("dir/below", META),
            Listed("dir", OWNED),
            Listed("x" * 256, META),
            Listed("y" * 256 + "/z", META),
        ],
    )
    assert table.counts == Counts(files=3, unknown=0, skipped=5)
    assert table.find("file") == META
    assert table.find("empty/below") == META
    assert table.find("dir/below") == META
    table.db.close()


def test_what_is_frozen_first_stays(tmp_path: Path) -> None:
    table = table_of(tmp_path, [Listed("a", None), Listed("b", META)])
    assert table.counts.unknown == 1
    assert table.freeze_file("a", META) == META
    assert table.freeze_file("a", OWNED) == META
    assert table.find("a") == META
    table.db.close()


def test_an_empty_manifest_and_a_broken_one_leave_nothing(tmp_path: Path) -> None:
    paths = ManifestPaths(tmp_path / "manifest", "d1")
    with pytest.raises(UsageError, match="names no file"):
        build(paths, [], needs_owners=False)

    def broken() -> Iterable[Listed]:
        yield Listed("a", META)
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        build(paths, broken(), needs_owners=False)
    assert paths.all_entries() == []


def test_another_manifest_takes_the_place(tmp_path: Path) -> None:
    manifests = tmp_path / "manifest"
    for digest in ("d1", "d2"):
        build(ManifestPaths(manifests, digest), [Listed("a", META)], needs_owners=False)
    assert os.listdir(manifests) == ["d2"]


def _cut(data: Path) -> None:
    os.truncate(data, 8192)


def _scribble(data: Path) -> None:
    data.write_bytes(b"garbage " * 4096)


def _mark(data: Path) -> None:
    data.with_name("damaged").touch()  # as a daemon leaves it


def _garble_counts(data: Path) -> None:
    database = Database.open(str(data.parent), ("rows", "meta"), 1 << 30)
    database.put("meta", b"counts", b"x y z")
    database.close()


@pytest.mark.parametrize("damage", [_cut, _scribble, _mark, _garble_counts])
def test_a_damaged_table_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], expect_log: Callable[[str], None]
) -> None:
    file = write(tmp_path / "m.jsonl", '{"path": "a", "size": 5, "mtime_ns": 1, "version": "v"}\n')
    options = {"manifest": str(file), "cache_dirs": (tmp_path / "cache",)}
    config = load_mount_config("file:///data", "/mnt/m", options)
    for turn in range(2):
        view = ManifestView(file, config)
        view.build(tmp_path / "manifest", needs_owners=False)
        (data,) = (tmp_path / "manifest").glob("*/table/data.mdb")
        assert isinstance(view._table, ManifestTable)
        assert view._table.find("a") == ObjectMeta(5, 1, "v")
        view.close()
        if turn == 0:
            expect_log("table can't be used .* it is rebuilt from the manifest")
            damage(data)


@pytest.mark.parametrize("is_met", [True, False])
def test_a_damaged_row_is_an_error_and_no_absent_file(
    tmp_path: Path, is_met: bool, expect_log: Callable[[str], None]
) -> None:
    """No other place has it. The next mount makes the table anew."""
    line = '{"path": "f%d", "size": %d, "mtime_ns": 1, "version": "v"}\n'
    file = write(tmp_path / "m.jsonl", "".join(line % (n, n) for n in range(9)))
    paths = TierPaths(tmp_path / "cache")
    paths.root.mkdir()
    options = {"manifest": str(file), "cache_dirs": (paths.root,)}
    config = load_mount_config("file:///data", "/mnt/m", options)

    def viewed() -> ManifestView:
        view = ManifestView(file, config)
        view.build(paths.manifests, needs_owners=False)
        return view

    viewed().close()
    (data,) = paths.manifests.glob("*/table/data.mdb")
    pages = data.read_bytes()
    row = struct.pack("<BQq", 2, 5, 1)
    assert row in pages
    data.write_bytes(pages.replace(row, struct.pack("<BQq", 2, 6, 1)))
    if is_met:
        expect_log("a row of rows has a wrong checksum")
        view = viewed()
        table = view._table
        assert table is not None
        assert table.find("f4") == ObjectMeta(4, 1, "v")
        for name in ("f5", "none"):
            with pytest.raises(CacheDirError, match="mount again"):
                table.find(name)
        with pytest.raises(CacheDirError, match="mount again"):
            table.children(0, None, 100)
        view.close()
    expect_log("it lacks rows")
    expect_log("table can't be used .* it is rebuilt from the manifest")
    check_databases([paths], has_crashed=not is_met)
    view = viewed()
    assert view._table is not None
    assert view._table.find("f5") == ObjectMeta(5, 1, "v")
    view.close()


def test_after_a_crash_the_tables_of_manifests_are_read_first(
    tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    expect_log("data.mdb is damaged: it can't be read")
    view = tmp_path / "cache" / "manifest" / "d1"
    for name in ("table", "namespace"):
        (view / name).mkdir(parents=True)
        (view / name / "data.mdb").symlink_to("/proc/self/mem")  # its beginning can't be read
    check_databases([TierPaths(tmp_path / "cache")], has_crashed=True)
    assert (view / "table" / "damaged").exists()
    assert (view / "namespace" / "damaged").exists()


def test_a_line_of_a_manifest_is_one_of_a_load(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    with manifest_writer(str(file), "") as writer:
        writer.add("a/b", META)
    line = PathReader("/mnt", "s3://bucket").line(file.read_bytes())
    assert line is not None
    assert line.path == "a/b"
    assert json.loads(file.read_text())["size"] == 5


def test_a_table_is_no_larger_than_it_should_be(tmp_path: Path) -> None:
    count = 20_000
    version = "0123456789abcdef" * 2
    listed = [
        Listed(f"dir{number % 20}/{number:07}.jpg", ObjectMeta(1, 1, version))
        for number in range(count)
    ]
    table = table_of(tmp_path, listed)
    table.db.close()
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "manifest").rglob("data.mdb"))
    assert size_bytes < 250 * count
    assert isinstance(table.db, Database)
