"""Usual programs write to a mount. Afterwards each file is the same there and at the source."""

import hashlib
import os
import shelve
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.mount.harness import PATIENCE_S, eventually
from tests.mount.stores import Store, local_store, s3_store
from tests.servers.seaweedfs import SeaweedFS

pytestmark = pytest.mark.long

WRITER = """
import os, sys
number, directory = int(sys.argv[1]), sys.argv[2]
for turn in range(4):
    with open(os.path.join(directory, f"{number:02}-{turn}.npy"), "wb") as file:
        file.write(bytes([number, turn]) * (5000 + 400 * number))
"""


@pytest.fixture(scope="module", params=["file", "s3"])
def mounted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    root = tmp_path_factory.mktemp(f"programs-{request.param}")
    if request.param == "file":
        with local_store(root) as store:
            store.site.mount("--rw")
            yield store
            store.site.umount()
    else:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        with s3_store(root, server, "programs") as store:
            store.site.mount("--rw")
            yield store
            store.site.umount()


@pytest.fixture
def place(mounted: Store, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the mount. At the end each of its files is compared with the source."""
    name = request.node.originalname.removeprefix("test_")
    directory = mounted.site.mountpoint / name
    directory.mkdir()
    yield directory
    shown = sorted(
        os.path.relpath(os.path.join(where, file), mounted.site.mountpoint)
        for where, _, files in os.walk(directory)
        for file in files
    )
    assert [path for path in mounted.names() if path.startswith(f"{name}/")] == shown
    for path in shown:
        assert mounted.read(path) == (mounted.site.mountpoint / path).read_bytes(), path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Some files outside the mount."""
    root = tmp_path / "tree"
    for number in range(12):
        directory = root / f"d{number % 3}" / "deep"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"file {number}").write_bytes(os.urandom(3000 * number))
    (root / "script").write_text("#!/bin/sh\necho $1\n")
    (root / "script").chmod(0o755)
    return root


def run(*words: object, where: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=where,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
        env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"},
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_git(place: Path, tree: Path) -> None:
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    run(*git, "init", "-q", where=tree)
    run(*git, "add", "-A", where=tree)
    run(*git, "commit", "-q", "-m", "one", where=tree)
    run("git", "clone", "-q", "--no-local", tree, place / "clone")
    clone = place / "clone"
    run("git", "fsck", "--strict", where=clone)
    (clone / "new").write_text("a line\n")
    run(*git, "add", "-A", where=clone)
    run(*git, "commit", "-q", "-m", "two", where=clone)
    run("git", "gc", "-q", where=clone)
    run("git", "fsck", "--strict", where=clone)
    assert run("git", "status", "--porcelain", where=clone) == ""
    assert run("git", "log", "--format=%s", where=clone).split() == ["two", "one"]


def test_sqlite(place: Path) -> None:
    with closing(sqlite3.connect(place / "data.db", timeout=PATIENCE_S)) as database:
        database.execute("create table t (number integer primary key, text text)")
        for turn in range(4):
            with database:
                rows = [(100 * turn + number, "x" * number) for number in range(100)]
                database.executemany("insert into t values (?, ?)", rows)
        with database:
            database.execute("delete from t where number % 7 = 0")
    with closing(sqlite3.connect(place / "data.db")) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        assert database.execute("select count(*) from t").fetchone() == (400 - 58,)


def test_tar(place: Path, tree: Path) -> None:
    run("tar", "-cf", place / "tree.tar", "-C", tree, ".")
    (place / "unpacked").mkdir()
    run("tar", "-xf", place / "tree.tar", "-C", place / "unpacked")
    assert digests(place / "unpacked") == digests(tree)
    assert os.access(place / "unpacked/script", os.X_OK)


def test_cp(place: Path, tree: Path) -> None:
    run("cp", "-a", tree, place / "copy")
    run("cp", "-a", place / "copy", place / "again")
    assert digests(place / "again") == digests(tree)
    assert (place / "again/script").stat().st_mtime_ns == (tree / "script").stat().st_mtime_ns
    run("diff", "-r", tree, place / "copy")


def test_shelve(place: Path) -> None:
    for turn in range(2):
        with shelve.open(str(place / "shelf")) as shelf:
            for number in range(40):
                shelf[f"{turn}-{number}"] = list(range(number))
    with shelve.open(str(place / "shelf"), "r") as shelf:
        assert len(shelf) == 80
        assert shelf["1-39"] == list(range(39))


def test_sed(place: Path) -> None:
    (place / "config").write_text("".join(f"key{number} = old\n" for number in range(500)))
    for turn in range(3):
        run("sed", "-i", f"s/key{turn} = old/key{turn} = new/", place / "config")
    assert (place / "config").read_text().count("new") == 3
    assert os.listdir(place) == ["config"]


def test_an_editor(place: Path) -> None:
    """Editors keep a backup, write the new text beside the file, and rename it."""
    text = place / "text"
    text.write_text("0")
    for turn in range(1, 4):
        (place / "text~").unlink(missing_ok=True)
        text.rename(place / "text~")
        with open(place / ".text.tmp", "x") as stream:
            stream.write(str(turn))
            stream.flush()
            os.fsync(stream.fileno())
        (place / ".text.tmp").rename(text)
        assert text.read_text() == str(turn)
    assert (place / "text~").read_text() == "2"
    assert sorted(os.listdir(place)) == ["text", "text~"]


def test_checkpoints(place: Path) -> None:
    """Archives are written with seeks, and replace the one before."""
    for turn in range(3):
        with zipfile.ZipFile(place / "model.tmp", "w") as archive:
            for number in range(8):
                archive.writestr(f"data/{number}", bytes([turn]) * 300_000)
        (place / "model.tmp").replace(place / "model.pt")
    with zipfile.ZipFile(place / "model.pt") as archive:
        assert archive.testzip() is None
        assert archive.read("data/7")[:1] == b"\x02"
    assert os.listdir(place) == ["model.pt"]


def test_events(place: Path) -> None:
    """Records are appended and flushed, and another program reads them meanwhile."""
    path = place / "events.out"
    with path.open("wb") as writer, path.open("rb") as reader:
        found = b""
        for number in range(30):
            record = struct.pack("<QI", number, 77) + b"e" * (50 * number)
            writer.write(record)
            writer.flush()
            found += reader.read()
            assert found.endswith(record)
            if number == 15:
                os.fsync(writer.fileno())
    assert path.read_bytes() == found


def test_32_processes(place: Path) -> None:
    command = (sys.executable, "-S", "-E", "-c", WRITER)
    processes = [subprocess.Popen([*command, str(number), place]) for number in range(32)]
    assert [process.wait(2 * PATIENCE_S) for process in processes] == [0] * 32
    assert len(os.listdir(place)) == 32 * 4
    for number in range(32):
        content = (place / f"{number:02}-3.npy").read_bytes()
        assert content == bytes([number, 3]) * (5000 + 400 * number)


def test_moves_and_deletions(place: Path, tree: Path) -> None:
    run("cp", "-r", tree, place / "a")
    run("mv", place / "a", place / "b")
    run("mv", place / "b/d0", place / "b/d1")
    assert sorted(os.listdir(place / "b/d1")) == ["d0", "deep"]
    run("find", place / "b/d1", "-delete")
    assert sorted(os.listdir(place / "b")) == ["d2", "script"]
    run("rm", "-r", place / "b/d2")
    assert digests(place) == {"b/script": digests(tree)["script"]}


def test_pip(place: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    info = "thing-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for number in range(20):
            archive.writestr(f"thing/m{number}.py", f"value = {number}\n")
        archive.writestr("thing/__init__.py", "from thing.m7 import value\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "--no-index", "--no-deps", "--target", place / "site", wheel)
    code = (
        f"import sys; sys.path.insert(0, {str(place / 'site')!r}); import thing; print(thing.value)"
    )
    assert run(sys.executable, "-c", code) == "7\n"


def test_tail(place: Path, tmp_path: Path) -> None:
    (place / "log").write_text("first\n")
    with (tmp_path / "out").open("wb") as out:
        tail = subprocess.Popen(["tail", "-n", "+1", "-s", "0.1", "-f", place / "log"], stdout=out)
    try:
        for number in range(5):
            with (place / "log").open("a") as stream:
                stream.write(f"line {number}\n")
            eventually(
                lambda text=f"line {number}\n": (tmp_path / "out").read_text().endswith(text)
            )
    finally:
        tail.kill()
        tail.wait()


def test_truncate_and_dd(place: Path) -> None:
    run("truncate", "-s", "3M", place / "sparse")
    run("dd", "if=/dev/zero", f"of={place / 'sparse'}", "bs=64k", "count=3", "seek=10",
        "conv=notrunc,fsync", "status=none")  # fmt: skip
    run("truncate", "-s", "-1", place / "sparse")
    assert (place / "sparse").read_bytes() == bytes((3 << 20) - 1)
