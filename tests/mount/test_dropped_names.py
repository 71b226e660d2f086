"""The kernel drops a name when nobody looks anything up in its directory. Whoever tells it so waits
until then, and that must not be a process that is to end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.fuse import relay
from tests.mount.harness import CLI, Site, children_of, eventually, is_running
from tests.mount.test_killed import HANGING_ORIGIN

pytestmark = pytest.mark.skipif(relay.why_not() is not None, reason=f"no relay: {relay.why_not()}")

PATIENCE_S = 180


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(HANGING_ORIGIN.format(marks=str(tmp_path)))
    site.environment = {"PYTHONPATH": str(tmp_path)}
    (site.files / "d").mkdir()
    (site.files / "d/gone").write_text("soon")
    site.mount("--data-path", "relay")
    yield site
    site.tear_down()


def look_up(site: Site) -> "subprocess.Popen[bytes]":
    """The origin does not answer."""
    code = "import os, sys; os.stat(sys.argv[1])"
    args = [sys.executable, "-S", "-E", "-c", code, str(site.mountpoint / "d/no-stat")]
    return subprocess.Popen(args, stderr=subprocess.DEVNULL)


def start_refresh(site: Site) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*CLI, "refresh", str(site.mountpoint / "d")],
        env=os.environ | site.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end(*processes: "subprocess.Popen[bytes] | None") -> None:
    for process in processes:
        if process is not None:
            process.kill()
            process.wait(PATIENCE_S)


def waits_in_the_kernel(*pids: int) -> bool:
    """One of the threads of these processes sleeps so that no signal reaches it."""
    for file in (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/stat")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if file.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


@contextmanager
def a_name_waits_to_be_dropped(site: Site) -> Iterator["subprocess.Popen[bytes]"]:
    """Yields the process whose look-up it waits for."""
    assert (site.mountpoint / "d/gone").read_text() == "soon"
    looker = look_up(site)
    refresh = None
    try:
        eventually((site.files.parent / "no-stat").exists, PATIENCE_S)
        (site.files / "d/gone").unlink()
        refresh = start_refresh(site)
        supervisor, daemon = site.pid(), site.daemon_pid()
        eventually(lambda: waits_in_the_kernel(supervisor, daemon), PATIENCE_S)
        yield looker
    finally:
        end(looker, refresh)


def test_a_kill_and_an_upgrade_while_a_name_waits_to_be_dropped(site: Site) -> None:
    site.expected_trouble = ("was killed by SIGKILL; what is cached is served on",)
    with a_name_waits_to_be_dropped(site):
        daemon = site.daemon_pid()
        os.kill(daemon, signal.SIGKILL)
        eventually(lambda: not is_running(daemon), PATIENCE_S)
        eventually(lambda: children_of(site.pid()) not in ([], [daemon]), PATIENCE_S)
        eventually(lambda: " serves on, after " in site.log.read_text(), PATIENCE_S)
        before = site.daemon_pid()
        assert "serves instead" in site.cli("upgrade", site.mountpoint).stdout
        assert site.daemon_pid() != before
    site.cli("refresh", site.mountpoint / "d")  # the first one may have died with the daemon
    eventually(lambda: not (site.mountpoint / "d/gone").exists(), PATIENCE_S)


def test_an_unmount_while_a_name_waits_to_be_dropped(site: Site) -> None:
    site.expected_trouble = ("the connection to the kernel was broken off",)
    with a_name_waits_to_be_dropped(site) as looker:
        supervisor, daemon = site.pid(), site.daemon_pid()
        site.cli("umount", "--force", site.mountpoint)
        eventually(lambda: not is_running(supervisor) and not is_running(daemon), PATIENCE_S)
        assert looker.wait(PATIENCE_S) == 1, "its look-up fails"
