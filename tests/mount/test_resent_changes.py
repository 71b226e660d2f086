"""A daemon is killed between the effect of a change and its answer. The kernel sends the request
again, and the next daemon gives the answer that the first one owed. Nothing is left behind."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mount.harness import Site
from tests.mount.stores import Store, local_store, s3_store
from tests.servers.seaweedfs import SeaweedFS

pytestmark = pytest.mark.long

KILLED = """
from cachefs.fuse.relay import _relay  # before libfuse
import functools, inspect, os, pathlib, signal
from cachefs.fuse.writing import WritingOperations
from cachefs.namespace.own_changes import OwnChanges
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.writes import background

background._QUIET_S = 1e9
PLAN = pathlib.Path({plan!r})

def reach(point):
    points = PLAN.read_text().split()
    if points[:1] == [point]:
        PLAN.write_text(" ".join(points[1:]))
        os.kill(os.getpid(), signal.SIGKILL)

def killing_after(point, plain):
    @functools.wraps(plain)
    async def slow(*args, **kwargs):
        result = await plain(*args, **kwargs)
        reach(point)
        return result

    @functools.wraps(plain)
    def fast(*args, **kwargs):
        result = plain(*args, **kwargs)
        reach(point)
        return result

    return slow if inspect.iscoroutinefunction(plain) else fast

POINTS = {{
    Spool: {{"begun": ["begin"]}},
    StagedFile: {{"spool": ["rename", "write", "truncate"]}},
    OwnChanges: {{"table": ["make_directory", "remove", "move", "set_attributes"]}},
    WritingOperations: {{"answer": ["create", "mknod", "mkdir", "unlink", "rmdir", "rename"]}},
}}
for owner, points in POINTS.items():
    for point, names in points.items():
        for name in names:
            setattr(owner, name, killing_after(point, getattr(owner, name)))
"""
"""`begun`: a staged file is in the spool, and its name not in the namespace's log. `spool`: so is a
change of a staged file. `table`: the origin has the change, but nothing on this machine. `answer`:
everything is done."""


class Case(NamedTuple):
    """What is done in a directory after `prepare`, where daemons are killed, and which files (None:
    directories) it has then. `change` is called with what `prepare` returns."""

    points: str
    prepare: Callable[[Path], int | None]
    change: Callable[[Path, int | None], object]
    files: dict[str, bytes | None]


def nothing(_: Path) -> None:
    pass


def two_files(directory: Path) -> None:
    (directory / "old").write_bytes(b"1")
    (directory / "new").write_bytes(b"22")


def a_directory(directory: Path) -> None:
    (directory / "old").mkdir()
    (directory / "old/file").write_bytes(b"1")


def opened(name: str) -> Callable[[Path], int]:
    """A new file of that name, which was not closed, beside one that was."""

    def prepare(directory: Path) -> int:
        (directory / ("new" if name == "old" else "old")).write_bytes(b"1")
        file = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(file, b"open")
        return file

    return prepare


def create(flags: int) -> Callable[[Path, object], None]:
    def change(directory: Path, _: object) -> None:
        os.close(os.open(directory / "new", os.O_CREAT | os.O_WRONLY | flags))

    return change


def rename(directory: Path, file: int | None) -> None:
    (directory / "old").rename(directory / "new")
    if file is not None:
        os.close(file)


def unlink(directory: Path, file: int | None) -> None:
    (directory / "old").unlink()
    if file is not None:
        os.close(file)


CASES = {
    "rmdir": Case("table", lambda d: (d / "old").mkdir(), lambda d, _: (d / "old").rmdir(), {}),
    "unlink": Case("table", two_files, unlink, {"new": b"22"}),
    "rename over a file": Case("table", two_files, rename, {"new": b"1"}),
    "rename over an open file": Case("table", opened("new"), rename, {"new": b"1"}),
    "rename a directory": Case("table", a_directory, rename, {"new": None, "new/file": b"1"}),
}
"""With each kind of store."""
LOCAL_CASES = {
    "create": Case("begun begun", nothing, create(0), {"new": b""}),
    "create exclusively": Case("answer", nothing, create(os.O_EXCL), {"new": b""}),
    "create and write": Case(
        "begun spool", nothing, lambda d, _: (d / "new").write_bytes(b"1"), {"new": b"1"}
    ),
    # SeaweedFS keeps nothing by which `mkdir` could recognise its own marker (docs/WRITES.md).
    "mkdir": Case("table", nothing, lambda d, _: (d / "new").mkdir(), {"new": None}),
    "unlink an open file": Case("spool", opened("old"), unlink, {"new": b"1"}),
    "rename an open file": Case("spool", opened("old"), rename, {"new": b"open"}),
    "rename over an open file, noted": Case("spool", opened("new"), rename, {"new": b"1"}),
}


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        with local_store(tmp_path) as found:
            yield found
    else:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        with s3_store(tmp_path, server, "resent") as found:
            yield found


def files_below(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in directory.rglob("*")
    }


def test_a_change_is_done_once_and_answered(store: Store, tmp_path: Path) -> None:
    site, plan = store.site, tmp_path / "plan"
    site.expected_trouble += ("was killed by SIGKILL",)
    plan.write_text("")
    site.customize(KILLED.format(plan=str(plan)))
    site.mount("--rw", "--data-path", "relay")
    wrong, wanted = {}, {}
    cases = CASES if store.site.source.startswith("s3:") else CASES | LOCAL_CASES
    for name, case in cases.items():
        directory = site.mountpoint / name
        directory.mkdir()
        prepared = case.prepare(directory)
        plan.write_text(case.points)
        try:
            case.change(directory, prepared)
            assert not plan.read_text(), f"{name}: no daemon came to {plan.read_text()}"
            found: object = files_below(directory)
        except OSError as error:
            found = error
            plan.write_text("")
        if found != case.files:
            wrong[name] = found
        wanted |= {f"{name}/{file}": data for file, data in case.files.items() if data is not None}
    assert not wrong
    assert site.cli("writes", site.mountpoint).stdout == "nothing is unsent\n"
    site.umount()
    assert {name: store.read(name) for name in store.names()} == wanted
    assert not list(site.cache.rglob("*.staged"))


def test_after_a_crash_only_files_with_a_byte_are_held(site: Site) -> None:
    """A file that was created and never closed had no name at the source, so nothing is lost."""
    site.expected_trouble = (" cachefs.mounts.prepare: ", "files are held and not uploaded")
    site.mount("--rw", "--data-path", "relay")
    flags = os.O_CREAT | os.O_WRONLY
    files = [os.open(site.mountpoint / name, flags) for name in ("empty", "written")]
    os.write(files[1], b"1")
    site.crash()
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
    for _ in range(2):
        said = site.cli("writes", "--cache-dir", site.cache).stdout
        assert "written" in said
        assert "empty" not in said
        site.mount("--rw")
        assert os.listdir(site.mountpoint) == []
        said = site.cli("writes", site.mountpoint).stdout
        assert "it was never closed" in said
        assert "empty" not in said
        site.umount()
    assert len(list(site.cache.rglob("*.staged"))) == 1
