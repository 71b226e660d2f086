"""`cachefs set MOUNTPOINT access-log=FILE`, by what real requests leave in it."""

import os
import re
from pathlib import Path

import pytest
import trio

from cachefs.errors import CachefsError
from cachefs.fuse import access_log
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.observers import Answered
from tests.mount.harness import Site, drop_pages

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z \[uid:(\d+|-),pid:(\d+|-)\] "
    r"(\w+) \((.*)\): (ok|absent|error|hit|wait) <\d+\.\d{6}>"
)


def note(log: AccessLog, operation: str, path: str) -> None:
    log.observe(Answered(operation, "ok", 1, 1, None, 1, 2), lambda ino: path)


def requests(file: Path) -> list[tuple[str, ...]]:
    """(uid, pid, operation, arguments, outcome) of each line."""
    found = []
    for line in file.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        found.append(match.groups())
    return found


def test_what_is_asked_is_logged_while_it_is_on(site: Site, tmp_path: Path) -> None:
    (site.files / "dir").mkdir()
    (site.files / "dir/file").write_bytes(b"x" * 5000)
    (site.files / "before").write_text("")
    site.mount()
    assert (site.mountpoint / "before").read_text() == ""
    log = tmp_path / "access"
    said = site.cli("set", site.mountpoint, f"access-log={log}").stdout
    assert said == f"access-log was off and is {log} until the mount ends\n"
    assert log.stat().st_mode & 0o777 == 0o600

    file = site.mountpoint / "dir/file"
    file.read_bytes()
    drop_pages(file)
    file.read_bytes()
    assert not (site.mountpoint / "absent").exists()
    os.listdir(site.mountpoint / "dir")
    with pytest.raises(OSError, match=r"No data available|not supported"):
        os.getxattr(file, "user.cachefs.nonsense")
    site.cli("set", site.mountpoint, "access-log=off")

    seen = requests(log)
    me = (str(os.getuid()), str(os.getpid()))
    assert (*me, "lookup", "/dir/file", "ok") in seen
    # Behind the relay the kernel opens by itself.
    is_relayed = site.status()["data_path"]["name"] == "relay"
    assert ((*me, "open", "/dir/file", "ok") in seen) != is_relayed
    assert (*me, "lookup", "/absent", "ok") in seen or (*me, "lookup", "/absent", "absent") in seen
    assert (*me, "getxattr", "/dir/file,user.cachefs.nonsense", "absent") in seen
    assert ("-", "-", "readdir", "/dir", "ok") in seen
    reads = [line for line in seen if line[2] == "read"]
    assert reads[0] == (me[0], "-", "read", reads[0][3], "wait")
    assert reads[-1] == (me[0], "-", "read", reads[-1][3], "hit")
    assert all(re.fullmatch(r"/dir/file,0,\d+", line[3]) for line in reads)
    assert not any("before" in line[3] for line in seen)

    size = log.stat().st_size
    (site.mountpoint / "absent again").exists()
    assert site.status()["limits"]["access_log"] == "off"
    site.umount()
    assert log.stat().st_size == size


def test_what_is_noted_last_is_written_at_the_end(site: Site, tmp_path: Path) -> None:
    site.mount()
    log = tmp_path / "access"
    site.cli("set", site.mountpoint, f"access-log={log}")
    (site.mountpoint / "last").exists()
    site.umount()
    assert "/last" in requests(log)[-1][3]


def test_where_it_cannot_be_written(site: Site, tmp_path: Path) -> None:
    site.mount()
    said = site.cli("set", site.mountpoint, f"access-log={tmp_path}/no/such", code=1).stderr
    assert "can't write the access log" in said
    said = site.cli("set", site.mountpoint, f"access-log={site.mountpoint}/x", code=1).stderr
    assert "below the mountpoint" in said
    assert site.status()["limits"]["access_log"] == "off"


async def test_a_cancellation_while_lines_are_written_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "_FLUSH_S", 0)
    for yields in range(12):
        log = AccessLog()
        file = tmp_path / str(yields)
        await log.switch(file)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            note(log, "lookup", "/last")
            for _ in range(yields):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert [line[3] for line in requests(file)] == ["/last"], yields


async def test_odd_names_stay_on_their_line(tmp_path: Path) -> None:
    log = AccessLog()
    file = tmp_path / "access"
    await log.switch(file)
    note(log, "lookup", "/two\nlines \udcff ünïcödé")
    note(log, "lookup", "/ünïcödé")
    await log.switch(None)
    lines = requests(file)
    assert lines[0][3] == "/two\\nlines \\udcff \\xfcn\\xefc\\xf6d\\xe9"
    assert lines[1][3] == "/ünïcödé"


async def test_too_much_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "_MOST_LINES", 3)
    log = AccessLog()
    await log.switch(tmp_path / "access")
    for _ in range(5):
        note(log, "getattr", "/")
    await log.switch(None)
    lines = (tmp_path / "access").read_text().splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("# 2 requests are missing")


async def test_a_large_file_is_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_MOST_BYTES", 50)
    log = AccessLog()
    await log.switch(tmp_path / "access")
    note(log, "getattr", "/first")
    await log.switch(tmp_path / "access")
    note(log, "getattr", "/second")
    await log.switch(None)
    assert "/second" in (tmp_path / "access.1").read_text()
    assert not (tmp_path / "access").exists()


@pytest.mark.expect_log("the access log ends")
async def test_a_file_that_cannot_be_written_any_more_ends_it(tmp_path: Path) -> None:
    log = AccessLog()
    directory = tmp_path / "gone"
    directory.mkdir()
    await log.switch(directory / "access")
    (directory / "access").unlink()
    directory.rmdir()
    note(log, "getattr", "/")
    await log.switch(None)
    assert log.file is None
    with pytest.raises(CachefsError):
        await log.switch(directory / "access")
