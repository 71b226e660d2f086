import errno
import fcntl
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs import mounts
from cachefs.errors import CachefsError, MountError
from cachefs.mounts import prepare, runtime, table
from cachefs.mounts.table import MountEntry, MountHealth

unmount_module = importlib.import_module("cachefs.mounts.unmount")  # not the function

MOUNTINFO = """\
22 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:13 - proc proc rw
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
99 28 0:50 / /mnt/with\\040space rw,nosuid,nodev - fuse.cachefs s3://bucket/a\\040b rw,user_id=0
98 28 0:51 / /mnt/\\303\\251 rw master:1 shared:2 - fuse.cachefs s3://b rw
97 28 0:52 / /mnt/plain ro - fuse.sshfs host: rw
this is no mount
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(runtime, "runtime_dir", lambda: path)
    return path


def test_mountinfo_is_parsed() -> None:
    parsed = table.parse_mountinfo(MOUNTINFO.splitlines(keepends=True))
    assert [mount.fstype for mount in parsed] == [
        "proc",
        "ext4",
        "fuse.cachefs",
        "fuse.cachefs",
        "fuse.sshfs",
    ]
    assert parsed[2][:3] == (Path("/mnt/with space"), "fuse.cachefs", "s3://bucket/a b")
    assert [mount.device for mount in parsed[2:4]] == ["0:50", "0:51"]
    assert parsed[3].mountpoint == Path("/mnt/é")


def test_the_user_of_a_mount_is_known_outside_user_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root, other, none = (
        MountEntry(Path("/mnt"), "fuse.cachefs", "s3://b", file_system_options=options)
        for options in ("ro,user_id=0,group_id=0", "rw,user_id=4711,group_id=0", "rw")
    )
    monkeypatch.setattr(table, "_has_own_users", lambda: False)
    assert [mount.other_user for mount in (root, other, none)] == [None, 4711, None]
    monkeypatch.setattr(table, "_has_own_users", lambda: True)
    assert other.other_user is None
    (parsed,) = table.parse_mountinfo(MOUNTINFO.splitlines()[2:3])
    assert parsed.file_system_options == "rw,user_id=0"


def test_the_kernels_own_table_is_understood() -> None:
    root = mounts.find_mount(Path("/"))
    assert root is not None
    assert mounts.find_mount(Path("/no/such/place")) is None
    assert mounts.find_mount(Path("/proc")) is not None


def test_the_mount_above_a_path_is_the_innermost_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [("/", "root"), ("/mnt", "below"), ("/mnt", "a"), ("/mnt/b", "b"), ("/mnt2", "c")]
    there = [MountEntry(Path(place), "ext4", source) for place, source in places]
    monkeypatch.setattr(table, "all_mounts", lambda: there)
    found = [table.mount_above(Path(path)) for path in ("/x", "/mnt", "/mnt/x", "/mnt/b/x")]
    assert [mount.source for mount in found if mount is not None] == ["root", "a", "a", "b"]


def test_canonical_resolves_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert mounts.canonical(tmp_path / "x" / ".." / "link") == tmp_path / "real"


def test_a_mount_answers() -> None:
    assert mounts.check_answers(Path("/proc")) is MountHealth.ALIVE


@pytest.mark.parametrize(
    ("number", "health"),
    [
        (errno.ENOTCONN, MountHealth.DEAD),
        (errno.EACCES, MountHealth.FORBIDDEN),
        (errno.EIO, MountHealth.ALIVE),
    ],
)
def test_no_answer_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, number: int, health: MountHealth
) -> None:
    def statvfs(path: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert mounts.check_answers(Path("/mnt")) is health


def test_the_check_gives_up_on_a_hanging_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(os, "statvfs", lambda path: release.wait(10))
    assert mounts.check_answers(Path("/proc"), timeout_s=0.05) is MountHealth.HANGING
    release.set()


class TestPrepare:
    def test_an_empty_directory_will_do(self, tmp_path: Path) -> None:
        mounts.prepare_mountpoint(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(MountError, match=r"does not exist; create it: mkdir -p"):
            mounts.prepare_mountpoint(tmp_path / "missing")

    def test_not_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(MountError, match="is not a directory"):
            mounts.prepare_mountpoint(tmp_path / "file")
        with pytest.raises(MountError, match="Not a directory"):
            mounts.prepare_mountpoint(tmp_path / "file" / "below")

    def test_not_empty(self, tmp_path: Path) -> None:
        for name in "abcde":
            (tmp_path / name).touch()
        with pytest.raises(MountError, match=r"'a', 'b', 'c' and 2 more.*-o nonempty"):
            mounts.prepare_mountpoint(tmp_path)
        mounts.prepare_mountpoint(tmp_path, True)

    def test_a_mount_of_something_else(self) -> None:
        with pytest.raises(MountError, match=r"/proc is already a mount of proc \(proc\)"):
            mounts.prepare_mountpoint(Path("/proc"))

    @pytest.mark.parametrize(
        ("fstype", "health", "text"),
        [
            (
                "fuse.cachefs",
                MountHealth.ALIVE,
                r"already a cachefs mount of s3://b; .*cachefs umount /",
            ),
            ("fuse.cachefs", MountHealth.HANGING, "does not answer; .*cachefs umount --force"),
            ("fuse.sshfs", MountHealth.DEAD, r"s3://b \(fuse.sshfs\) whose daemon is gone; .*-uz"),
            ("fuse.sshfs", MountHealth.ALIVE, r"already a mount of s3://b \(fuse.sshfs\)"),
        ],
    )
    def test_a_fuse_mount(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        fstype: str,
        health: MountHealth,
        text: str,
    ) -> None:
        monkeypatch.setattr(prepare, "find_mount", lambda path: MountEntry(path, fstype, "s3://b"))
        monkeypatch.setattr(prepare, "check_answers", lambda path: health)
        with pytest.raises(MountError, match=text):
            mounts.prepare_mountpoint(tmp_path)

    def test_what_a_dead_cachefs_left_is_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log: object
    ) -> None:
        expect_log("which a dead cachefs had left")
        stack = [MountEntry(tmp_path, "fuse.cachefs", "s3://b")] * 2
        monkeypatch.setattr(prepare, "find_mount", lambda path: stack[-1] if stack else None)
        monkeypatch.setattr(prepare, "check_answers", lambda path: MountHealth.DEAD)
        monkeypatch.setattr(prepare, "unmount", lambda path, lazy: stack.pop())
        mounts.prepare_mountpoint(tmp_path)
        assert not stack


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=False, capture_output=True)


@pytest.mark.root
def test_another_process_frees_what_was_unmounted(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmpfs.stat().st_dev
    close = unmount_module._close_in_another_process
    closed: list[tuple[int, object]] = []

    def record(descriptor: int) -> None:
        closed.append((os.fstat(descriptor).st_dev, mounts.find_mount(tmpfs)))
        close(descriptor)

    monkeypatch.setattr(unmount_module, "_close_in_another_process", record)
    mounts.unmount(tmpfs)
    assert closed == [(device, None)]


@pytest.mark.root
def test_the_copy_of_a_mount_does_not_make_it_busy_and_its_users_do(tmpfs: Path) -> None:
    # Another process is the user: a file of this one is for a moment also a file of each process
    # that it starts, as `unmount` does.
    with subprocess.Popen(["cat"], cwd=tmpfs, stdin=subprocess.PIPE) as user:
        with pytest.raises(OSError) as caught:
            mounts.unmount(tmpfs)
        assert caught.value.errno == errno.EBUSY
        user.communicate()
    mounts.unmount(tmpfs)
    assert mounts.find_mount(tmpfs) is None


def test_unmounting_what_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        mounts.unmount(tmp_path)
    assert caught.value.errno in {errno.EINVAL, errno.EPERM}


def test_holders_names_the_process_and_what_it_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = mounts.holders(tmp_path)
        process.communicate(b"\n")
    assert [(h.pid, h.what) for h in found] == [(process.pid, f"working directory {tmp_path}")]
    assert mounts.holders(tmp_path) == []


class TestRuntimeFile:
    def test_it_tells_who_serves(self, run_dir: Path) -> None:
        place = Path("/mnt/x")
        with mounts.RuntimeFile(place, "s3://b", Path("/log")):
            entry = mounts.find_entry(place)
            assert entry is not None
            assert entry.alive
            assert (entry.pid, entry.source, entry.log_file) == (os.getpid(), "s3://b", "/log")
            assert mounts.read_entries() == [entry]
        assert mounts.find_entry(place) is None

    def test_a_process_of_another_container_is_not_looked_for_here(
        self, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its number is that of a stranger here, who must get no signal."""
        place = Path("/mnt/x")
        with mounts.RuntimeFile(place, "s3://b"):
            entry = mounts.find_entry(place)
            assert entry is not None
            assert not entry.is_elsewhere
            owner = mounts.open_owner(entry)
            assert owner is not None
            os.close(owner)
            assert mounts.mountpoint_of(os.getpid()) == "/mnt/x"
            here = entry.pid_namespace
            monkeypatch.setattr(runtime, "_pid_namespace", lambda: here + 1)
            assert entry.is_elsewhere
            assert mounts.open_owner(entry) is None
            assert mounts.mountpoint_of(os.getpid()) is None
            with pytest.raises(MountError, match="a process in another container, s3://b"):
                mounts.RuntimeFile(place, "s3://other")

    def test_there_is_one_per_mountpoint(self, run_dir: Path) -> None:
        place = Path("/mnt/x")
        with (
            mounts.RuntimeFile(place, "s3://b"),
            mounts.RuntimeFile(Path("/mnt/y"), "s3://b"),
            pytest.raises(MountError, match=rf"already served .*process {os.getpid()}, s3://b"),
        ):
            mounts.RuntimeFile(place, "s3://other")
        mounts.RuntimeFile(place, "s3://other").close()

    def test_what_a_dead_daemon_left_is_taken_over(self, run_dir: Path) -> None:
        place = Path("/mnt/x")
        runtime.entry_path(place).write_text(
            json.dumps({"mountpoint": "/mnt/x", "source": "s3://b", "pid": 1, "started_at": 0})
        )
        entry = mounts.find_entry(place)
        assert entry is not None
        assert not entry.alive
        with mounts.RuntimeFile(place, "s3://c"):
            mounts.remove_leftovers(place)
            assert mounts.find_entry(place) is not None
        runtime.entry_path(place).touch()
        mounts.remove_leftovers(place)
        assert list(run_dir.iterdir()) == []

    def test_what_killed_mounts_left_long_ago_goes(self, run_dir: Path) -> None:
        served, other = Path("/mnt/x"), Path("/mnt/y")
        with mounts.RuntimeFile(served, "s3://b"):
            old = [mounts.spare_path(served), mounts.spare_path(other)]
            for path in old:
                path.mkdir()
                (path / "file").touch()
            journals = [path.with_suffix(".journal.0") for path in (*old, run_dir / "new.spare")]
            for path in journals:
                path.touch()
            for path in (*old, *journals[:2]):
                os.utime(path, (0, 0))
            with mounts.RuntimeFile(Path("/mnt/z"), "s3://c"):
                left = {path.name for path in run_dir.iterdir() if path.suffix != ".json"}
        assert left == {old[0].name, journals[0].name, journals[2].name}

    @pytest.mark.parametrize("content", ["", "{}", "[]", "nonsense", '{"pid": "x"}'])
    def test_a_damaged_file_is_no_entry(self, run_dir: Path, content: str) -> None:
        (run_dir / "x.json").write_text(content)
        assert mounts.read_entries() == []

    def test_a_lost_race_for_the_file_is_noticed(
        self, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file is removed by its owner between our open and our lock."""
        path = runtime.entry_path(Path("/mnt/x"))
        real_flock = fcntl.flock
        calls = []

        def flock(fd: int, operation: int) -> None:
            if not calls:
                path.unlink()
            calls.append(operation)
            real_flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        with mounts.RuntimeFile(Path("/mnt/x"), "s3://b"):
            assert path.exists()
        assert len(calls) == 2


@pytest.mark.root
def test_the_runtime_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "RUNTIME_DIR", tmp_path / "cachefs")
    assert runtime.runtime_dir().stat().st_mode & 0o777 == 0o700
    (tmp_path / "cachefs").chmod(0o755)
    assert runtime.runtime_dir().stat().st_mode & 0o777 == 0o700
    (tmp_path / "cachefs").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "cachefs").symlink_to("elsewhere")
    with pytest.raises(CachefsError, match="mode 700"):
        runtime.runtime_dir()
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755


def test_the_default_log_file_names_the_mountpoint() -> None:
    assert mounts.default_log_file(Path("/mnt/a b")).name == "mnt-a b.log"
    assert mounts.default_log_file(Path("/")).name == "root.log"


def test_nothing_is_logged_without_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mounts.cachefs_mounts()
    assert not caplog.records
