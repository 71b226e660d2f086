"""mount, status and umount with a real daemon and /dev/fuse, over a directory as the origin."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.mounts import default_log_file, find_entry, find_mount, unmount
from tests.mount.harness import DATA_PATH, crash, is_running
from tests.servers.suspend import suspend

CACHEFS = Path(sys.executable).with_name("cachefs")

pytestmark = pytest.mark.mount


class Site:
    """A source with one file, a mountpoint, and a cache directory."""

    def __init__(self, root: Path) -> None:
        self.source = root / "source"
        self.mountpoint = root / "mnt"
        self.log_file = root / "log"
        self.cache = root / "cache"
        self.source.mkdir()
        self.mountpoint.mkdir()
        (self.source / "file").write_text("content")

    def run(self, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [CACHEFS, *map(str, args)], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        return done

    def mount_args(self) -> list[object]:
        cache = ["--cache-dir", self.cache, "--cache-size", "64MiB", "--free-space-ratio", "0"]
        log = ["--log-file", self.log_file]
        path = ["--data-path", DATA_PATH]
        return ["mount", f"file://{self.source}", self.mountpoint, *cache, *log, *path]

    def mount(self, *args: object, code: int = 0) -> str:
        return self.run(*self.mount_args(), *args, code=code).stderr

    def umount(self, *args: object, code: int = 0) -> str:
        return self.run("umount", self.mountpoint, *args, code=code).stderr

    def status(self, code: int = 0) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(
            self.run("status", self.mountpoint, "--json", code=code).stdout
        )[0]
        return row

    def pid(self) -> int:
        entry = find_entry(self.mountpoint)
        assert entry is not None
        return entry.pid

    def kill(self) -> None:
        crash(self.pid())
        while find_entry(self.mountpoint).alive:  # type: ignore[union-attr]
            pass

    def is_clean(self) -> bool:
        return find_mount(self.mountpoint) is None and find_entry(self.mountpoint) is None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    while find_mount(site.mountpoint):
        entry = find_entry(site.mountpoint)
        if entry is not None and entry.alive:
            with contextlib.suppress(ProcessLookupError):
                crash(entry.pid)
        unmount(site.mountpoint, lazy=True)


def test_mount_returns_when_it_answers_and_umount_when_it_is_gone(site: Site) -> None:
    assert site.mount() == ""
    assert (site.mountpoint / "file").read_text() == "content"
    row = site.status()
    assert row["state"] == "serving"
    assert row["source"] == f"file://{site.source}"
    pid = site.pid()
    assert pid == (row["supervisor_pid"] or row["pid"])
    assert site.umount() == ""
    assert site.is_clean()
    assert not is_running(pid)
    assert not default_log_file(site.mountpoint).exists()


def test_a_second_mount_is_refused_and_the_first_goes_on(site: Site) -> None:
    site.mount()
    assert "already" in site.mount(code=1)
    assert "already" in site.mount("-f", code=1)
    assert (site.mountpoint / "file").read_text() == "content"


def test_umount_names_who_is_in_the_way(site: Site) -> None:
    site.mount()
    with (site.mountpoint / "file").open():
        said = site.umount(code=1)
        assert f"(process {os.getpid()}: open file {site.mountpoint}/file)" in said
        assert "--lazy" in said
    site.umount()
    assert site.is_clean()


def test_lazy_umount_lets_the_present_users_finish(site: Site) -> None:
    site.mount()
    pidfd = os.pidfd_open(site.pid())
    with (site.mountpoint / "file").open() as stream:
        assert "serves the present ones" in site.run("umount", "--lazy", site.mountpoint).stdout
        assert find_mount(site.mountpoint) is None
        assert stream.read() == "content"
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(20_000)
    os.close(pidfd)


def test_who_still_uses_a_lazily_unmounted_mount_is_left_alone(site: Site) -> None:
    site.mount()
    with (site.mountpoint / "file").open() as stream:
        site.run("umount", "--lazy", site.mountpoint)
        force = f"cachefs umount --force {site.mountpoint}"
        said = site.umount(code=1)
        assert "is unmounted already, and process" in said
        assert force in said
        assert "is unmounted already" in site.run("umount", "--lazy", site.mountpoint).stdout
        said = site.mount(code=1)
        assert "was unmounted, but its daemon" in said
        assert force in said
        assert stream.read() == "content"
        site.run("umount", "--force", site.mountpoint)
        assert site.is_clean()
    site.mount()
    site.umount()


def test_a_dead_daemon_is_shown_and_unmounted(site: Site) -> None:
    site.mount()
    site.kill()
    row = site.status(code=1)
    assert row["state"] == "stale"
    assert "cachefs umount" in row["problem"]
    site.umount()
    assert site.is_clean()


def test_mounting_takes_over_from_a_dead_daemon(site: Site) -> None:
    site.mount()
    site.kill()
    site.mount()
    assert (site.mountpoint / "file").read_text() == "content"
    assert "which a dead cachefs had left" in site.log_file.read_text()
    site.umount()
    assert site.is_clean()


def test_a_hanging_daemon_can_be_removed_by_force(site: Site) -> None:
    site.mount()
    suspend(site.pid())
    site.umount("--force")
    assert site.is_clean()


def test_errors_of_the_daemon_reach_the_terminal(site: Site) -> None:
    (site.mountpoint / "x").touch()
    said = site.mount(code=1)
    assert said.startswith(f"cachefs: error: the mountpoint {site.mountpoint} is not empty")
    assert said.count("\n") == 1
    assert site.is_clean()
    site.mount("-o", "nonempty")
    site.umount()
    (site.mountpoint / "x").unlink()
    site.source = site.source / "missing"
    assert "missing" in site.mount(code=1)
    assert site.is_clean()


def test_foreground_serves_until_interrupted(site: Site) -> None:
    args = [str(arg) for arg in (CACHEFS, *site.mount_args(), "-f")]
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True) as daemon:
        while find_mount(site.mountpoint) is None:
            assert daemon.poll() is None
        assert (site.mountpoint / "file").read_text() == "content"
        daemon.send_signal(signal.SIGINT)
        assert daemon.communicate(timeout=300)[1] == ""
    assert daemon.returncode == 0
    assert site.is_clean()
