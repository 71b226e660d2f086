"""What users see of unsent files, and what they can do about them: `cachefs writes` and
`cachefs flush`, through the real kernel."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import PATIENCE_S, Site, eventually, unchangeable


@pytest.fixture
def rw(site: Site) -> Iterator[Site]:
    site.expected_trouble = (
        "it stays in the spool",
        "cachefs.writes.sending.file_sends: ",
        "stay in the spool",
    )
    site.mount("--rw")
    yield site
    if site.is_mounted():
        site.umount()


@contextlib.contextmanager
def no_origin(site: Site) -> Iterator[None]:
    """Nothing can be sent for a while: no name in the source can be changed."""
    with unchangeable(site.files):
        yield


def write_in_vain(path: Path, content: bytes) -> None:
    """Write a file whose close fails."""
    stream = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(stream, content)
    with pytest.raises(OSError):
        os.close(stream)


_WRITER = """
import sys
with open(sys.argv[1], sys.argv[2]) as stream:
    stream.write(sys.argv[3])
    stream.flush()
    print("written", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def writing(path: Path, mode: str, text: str) -> Iterator[None]:
    """Another process writes to the file, and has it open meanwhile. In this process each start of
    a command would close a copy of the descriptor, and a close sends the file."""
    writer = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WRITER, path, mode, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "written\n"
        yield
    finally:
        writer.communicate("end\n", timeout=PATIENCE_S)


def unsent(site: Site, *arguments: object) -> list[dict[str, Any]]:
    where = arguments or (site.mountpoint,)
    rows: list[dict[str, Any]] = json.loads(site.cli("writes", *where, "--json").stdout)
    return rows


def failed_file(site: Site) -> dict[str, Any]:
    """The only unsent file, which could not be sent. For moments it is sent again."""
    found: list[dict[str, Any]] = []

    def has_failed() -> bool:
        found[:] = unsent(site)
        return [row["state"] for row in found] == ["failed"]

    eventually(has_failed)
    return found[0]


def shows(site: Site, text: str, *arguments: object) -> None:
    """A command shows this as soon as the file is not being sent again."""
    eventually(lambda: text in site.cli(*arguments).stdout)


def conflict(site: Site, *, cached: bool = True) -> dict[str, Any]:
    """A part of a file was changed here, and all of it at the origin. Returns what is listed."""
    file, other = site.mountpoint / "shared", site.files / "shared"
    if not other.exists():
        file.write_bytes(b"first version")
    if cached:
        file.read_bytes()
        eventually(lambda: os.getxattr(file, "user.cachefs.cached") == b"100")
    stream = os.open(file, os.O_WRONLY)
    os.pwrite(stream, b"OURS!", 0)
    other.write_bytes(b"version of somebody else")
    with pytest.raises(OSError, match="Stale"):
        os.close(stream)
    return unsent(site)[-1]


def test_a_failed_file_is_listed_saved_and_sent(rw: Site, tmp_path: Path) -> None:
    assert rw.cli("writes", rw.mountpoint).stdout == "nothing is unsent\n"
    file = rw.mountpoint / "file"
    with no_origin(rw):
        write_in_vain(file, b"kept")
        row = failed_file(rw)
        assert (row["path"], row["size_bytes"]) == (str(file), 4)
        assert row["mountpoint"] == str(rw.mountpoint)
        assert "can't be written" in row["reason"]
        assert len(unsent(rw, file)) == 1
        assert unsent(rw, rw.mountpoint / "other") == []
        assert f" {file}" in rw.cli("writes", file).stdout
        shows(rw, "check its owner and mode; it is tried again", "writes", file)
        spool_file = rw.cli("writes", "save", file).stdout.strip()
        assert Path(spool_file).read_bytes() == b"kept"
        rw.cli("writes", "save", row["id"], tmp_path / "saved", "-m", rw.mountpoint)
        assert (tmp_path / "saved").read_bytes() == b"kept"
        refused = rw.cli("writes", "save", file, tmp_path / "saved", code=2)
        assert "exists already" in refused.stderr
        failed = rw.cli("flush", rw.mountpoint, code=1).stderr
        assert failed.startswith(f"cachefs: {file}: file://")
        assert failed.count("\n") == 1
    rw.cli("flush", file)
    assert (rw.files / "file").read_bytes() == b"kept"
    assert unsent(rw) == []
    assert "no such unsent file" in rw.cli("writes", "send", file, code=2).stderr


def test_flush_sends_and_waits(rw: Site) -> None:
    (rw.mountpoint / "dir").mkdir()
    (rw.mountpoint / "sent").write_bytes(b"x")
    names = [f"dir/{number}" for number in range(9)]
    with no_origin(rw):
        for name in names:
            write_in_vain(rw.mountpoint / name, name.encode())
        write_in_vain(rw.mountpoint / "top", b"top")
        assert len(unsent(rw)) == 10
    # The mount may have sent some of them already.
    said = rw.cli("flush", rw.mountpoint / "dir").stdout
    assert re.fullmatch(r"sent \d files? \(\d+ B\)\n|nothing is unsent there\n", said)
    assert all((rw.files / name).read_bytes() == name.encode() for name in names)
    done = json.loads(rw.cli("flush", rw.mountpoint, "--json").stdout)
    assert done["left_files"] == done["left_bytes"] == 0
    assert (rw.files / "top").read_bytes() == b"top"
    assert rw.cli("flush", rw.mountpoint).stdout == "nothing is unsent there\n"


def test_flush_does_not_send_a_file_that_is_not_complete(rw: Site) -> None:
    log, new = rw.mountpoint / "log", rw.mountpoint / "new"
    log.write_bytes(b"one ")
    with writing(log, "a", "two"), writing(new, "w", "not yet"):
        assert [row["state"] for row in unsent(rw, new)] == ["open"]
        failed = rw.cli("flush", rw.mountpoint, code=1)
        # The mount may have sent the other file already, because it was quiet.
        assert failed.stdout in ("sent 1 file (7 B)\n", "")
        expected = f"cachefs: {new}: it is open and not complete yet; its next close sends it\n"
        assert failed.stderr == expected
        assert (rw.files / "log").read_bytes() == b"one two"
        assert not (rw.files / "new").exists()
        assert "is open: close it" in rw.cli("writes", "drop", new, "--yes", code=1).stderr
    assert (rw.files / "new").read_bytes() == b"not yet"


def test_a_conflict_is_saved_and_dropped(rw: Site, tmp_path: Path) -> None:
    row = conflict(rw)
    file = rw.mountpoint / "shared"
    assert row["state"] == "conflict"
    assert "wait for you" in rw.cli("writes", file).stdout
    rw.cli("writes", "save", file, tmp_path)
    assert (tmp_path / "shared").read_bytes() == b"OURS! version"
    refused = rw.cli("writes", "drop", file, code=2).stderr
    assert "add --yes" in refused
    assert len(unsent(rw)) == 1
    failed = rw.cli("flush", rw.mountpoint, code=1).stderr
    assert failed.startswith(f"cachefs: {file}: conflict: ")
    said = rw.cli("writes", "drop", file, "--yes").stdout
    assert said == f"dropped {file} (13 B)\n"
    assert unsent(rw) == []
    eventually(lambda: file.read_bytes() == b"version of somebody else")
    eventually(lambda: not list((rw.cache / "spool/files").iterdir()))


def test_a_conflict_is_sent_only_if_the_other_version_may_be_lost(rw: Site) -> None:
    conflict(rw)
    file = rw.mountpoint / "shared"
    assert "--overwrite" in rw.cli("writes", "send", file, code=1).stderr
    assert (rw.files / "shared").read_bytes() == b"version of somebody else"
    rw.cli("writes", "send", file, "--overwrite")
    assert (rw.files / "shared").read_bytes() == b"OURS! version"
    assert file.read_bytes() == b"OURS! version"
    assert unsent(rw) == []


def test_files_of_one_path_are_told_apart_by_their_ids(rw: Site, tmp_path: Path) -> None:
    first, second = conflict(rw), conflict(rw)
    assert first["path"] == second["path"]
    assert len(unsent(rw)) == 2
    file = rw.mountpoint / "shared"
    refused = rw.cli("writes", "save", file, tmp_path, code=2).stderr
    assert f"{first['id']} (conflict), {second['id']} (conflict)" in refused
    mount = ("-m", rw.mountpoint)
    rw.cli("writes", "save", second["id"], tmp_path / "second", *mount)
    assert (tmp_path / "second").read_bytes() == b"OURS!on of somebody else"
    rw.cli("writes", "drop", first["id"], "--yes", *mount)
    assert [row["id"] for row in unsent(rw)] == [second["id"]]


def test_a_conflict_with_a_version_that_nobody_has_any_more(rw: Site, tmp_path: Path) -> None:
    (rw.files / "shared").write_bytes(b"first version")
    row = conflict(rw, cached=False)
    file = rw.mountpoint / "shared"
    said = rw.cli("writes", "save", file, tmp_path, code=1).stderr
    assert f"writes save {row['id']} without a target" in said
    assert not (tmp_path / "shared").exists()
    done = rw.cli("writes", "save", file)
    assert "only the written parts" in done.stderr
    assert Path(done.stdout.strip()).read_bytes() == b"OURS!"


def test_a_file_that_was_never_closed_is_held(rw: Site, tmp_path: Path) -> None:
    stream = os.open(rw.mountpoint / "half", os.O_CREAT | os.O_WRONLY)
    os.write(stream, b"half of it")
    rw.crash()
    with contextlib.suppress(OSError):
        os.close(stream)
    rw.cli("umount", rw.mountpoint)
    (row,) = unsent(rw, "--cache-dir", rw.cache)
    assert (row["path"], row["state"], row["mountpoint"]) == ("half", "held", None)
    rw.cli("writes", "save", "half", tmp_path / "left", "--cache-dir", rw.cache)
    assert (tmp_path / "left").read_bytes() == b"half of it"
    rw.mount("--rw")
    assert "in use by a daemon" in rw.cli("writes", "--cache-dir", rw.cache, code=1).stderr
    (row,) = unsent(rw)
    assert (row["path"], row["state"]) == (str(rw.mountpoint / "half"), "held")
    assert row["reason"]
    assert not (rw.mountpoint / "half").exists()
    rw.cli("writes", "send", rw.mountpoint / "half")
    assert (rw.files / "half").read_bytes() == b"half of it"
    assert (rw.mountpoint / "half").read_bytes() == b"half of it"
    assert unsent(rw) == []


def test_a_read_only_mount_has_nothing_unsent(site: Site) -> None:
    site.mount()
    assert unsent(site) == []
    assert site.cli("flush", site.mountpoint).stdout == "nothing is unsent there\n"
    refused = site.cli("writes", "drop", "7", "--yes", "-m", site.mountpoint, code=2).stderr
    assert "no such unsent file" in refused


def test_status_and_commands_count_writes(rw: Site) -> None:
    file = rw.mountpoint / "file"
    before = rw.status()["writes"]
    file.write_bytes(b"four")
    (rw.mountpoint / "dir").mkdir()
    file.rename(rw.mountpoint / "dir/file")
    (rw.mountpoint / "dir/file").unlink()
    writes = rw.status()["writes"]
    more = {name: writes[name] - before[name] for name in ("puts", "copies", "deletes")}
    assert more == {"puts": 2, "copies": 1, "deletes": 1}
    assert writes["sent_bytes"] - before["sent_bytes"] == 4
    assert writes["unsent_files"] == writes["errors"] == 0
    assert "UNSENT         0 files, 0 B" in rw.cli("status", rw.mountpoint).stdout
    with no_origin(rw):
        write_in_vain(file, b"kept")
        writes = rw.status()["writes"]
        assert (writes["unsent_files"], writes["unsent_bytes"]) == (1, 4)
        assert writes["spool_bytes"] >= 4
        shows(rw, "1 file could not be sent: see cachefs writes", "status", rw.mountpoint)
        shows(rw, "unsent    failed: file://", "info", file)
        line = json.loads(rw.cli("stats", rw.mountpoint, "-n1", "-i.1", "--json").stdout)
        assert (line["writes"]["unsent_files"], line["writes"]["unsent_bytes"]) == (1, 4)
        assert " UNS " in rw.cli("stats", rw.mountpoint, "-n1", "-i.1").stdout
        with urllib.request.urlopen(f"http://{rw.status()['metrics']}/metrics") as answer:
            assert b'cachefs_unsent_files{state="failed"} ' in answer.read()


def test_read_only_mounts_show_what_they_did_before(site: Site) -> None:
    site.mount()
    assert "writes" not in site.status()
    assert "UNSENT" not in site.cli("status", site.mountpoint).stdout
    assert "writes" not in json.loads(site.cli("stats", site.mountpoint, "-n1", "--json").stdout)
    assert "SENT" not in site.cli("stats", site.mountpoint, "-n1", "-i.1").stdout
