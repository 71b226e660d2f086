"""cachefs@.service as systemd would run it, without systemd: its commands, privileges, messages."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.cli.install_systemd import units
from cachefs.mounts import MountHealth, check_answers, find_mount
from tests.mount.harness import DATA_PATH, Site, children_of, crash

CACHEFS = Path(sys.executable).with_name("cachefs")


def _value(text: str, key: str) -> str:
    found = re.search(f"^{key}=(.*)$", text, re.MULTILINE)
    assert found is not None, key
    return found[1]


def _start(text: str, key: str = "ExecStart") -> list[str]:
    """A command of a unit with the privileges that are left to it."""
    kept = _value(text, "CapabilityBoundingSet").lower().replace("cap_", "+").split()
    limits = ["setpriv", f"--bounding-set={','.join(['-all', *kept])}", "--no-new-privs"]
    assert _value(text, "NoNewPrivileges") == "yes"
    return [*limits, *shlex.split(_value(text, key))]


class Unit:
    """The instance "data" of the unit, with its files below `home`."""

    def __init__(self, site: Site, home: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("the system's units run as root")
        self.site = site
        here = {
            name: text.replace("%i", "data").replace("/etc/cachefs/", f"{home}/")
            for name, text in units(False, CACHEFS).items()
        }
        self.text, self.load_text = here["cachefs@.service"], here["cachefs-load@.service"]
        (home / "data.toml").write_text(
            f'source = "{site.source}"\nmountpoint = "{site.mountpoint}"\n'
            f'cache_dir = "{site.cache}"\ncache_size = "64MiB"\nfree_space_ratio = 0\n'
            f'data_path = "{DATA_PATH}"\n'
            '[load]\npaths = ["."]\n'
        )
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(home / "notify"))
        self.socket.settimeout(300)

    def value(self, key: str) -> str:
        return _value(self.text, key)

    def environment(self) -> dict[str, str]:
        """Little more than what systemd gives to a service."""
        watchdog = {"WATCHDOG_USEC": str(int(self.value("WatchdogSec")) * 1_000_000)}
        notify = {"NOTIFY_SOCKET": str(self.socket.getsockname())}
        return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **notify, **watchdog}

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        with self.site.log.open("ab") as log:
            daemon = subprocess.Popen(_start(self.text), env=self.environment(), stderr=log)
        try:
            while (message := self.socket.recv(4096).decode()) == "WATCHDOG=1":
                pass
            assert message.startswith("READY=1\nSTATUS=serving "), message
            yield daemon
        finally:
            if daemon.poll() is None:
                crash(daemon.pid)
            daemon.wait()
            self.after()

    def load(self, code: int = 0) -> None:
        done = subprocess.run(_start(self.load_text), check=False, capture_output=True, timeout=300)
        assert done.returncode == code, done

    def after(self) -> None:
        command = shlex.split(self.value("ExecStopPost").removeprefix("-"))
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def unit(site: Site, tmp_path: Path) -> Iterator[Unit]:
    home = tmp_path / "instances"
    home.mkdir()
    unit = Unit(site, home)
    yield unit
    unit.socket.close()


def test_started_stopped_and_cleaned_up(unit: Unit) -> None:
    site = unit.site
    (site.files / "private").write_text("content")
    (site.files / "private").chmod(0o600)
    with unit.started() as daemon:
        assert (site.mountpoint / "private").read_text() == "content"
        daemon.terminate()
        assert daemon.wait(300) == 0
    assert not site.is_mounted()


def test_a_killed_daemon_leaves_no_dead_mount(unit: Unit) -> None:
    site = unit.site
    with unit.started() as daemon:
        crash(daemon.pid)
        daemon.wait()
        assert check_answers(site.mountpoint) is MountHealth.DEAD
        unit.after()
        assert find_mount(site.mountpoint) is None
    unit.after()  # nothing is there any more, which is fine
    with unit.started() as daemon:
        unit.after()  # what lives stays
        assert check_answers(site.mountpoint) is MountHealth.ALIVE
        crash(daemon.pid)
        daemon.wait()
        with unit.started():  # takes over
            assert check_answers(site.mountpoint) is MountHealth.ALIVE
    site.expected_trouble += ("which a dead cachefs had left",)


def test_reload_replaces_the_daemon(unit: Unit) -> None:
    with unit.started() as process:
        children = children_of(process.pid)
        done = subprocess.run(
            _start(unit.text, "ExecReload"),
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if DATA_PATH == "python":
            assert "has no supervisor" in done.stderr
            return
        assert (done.returncode, done.stderr) == (0, "")
        (daemon,) = children
        assert f"serves instead of {daemon}" in done.stdout
        assert children_of(process.pid) != [daemon]
        assert check_answers(unit.site.mountpoint) is MountHealth.ALIVE


def test_wrong_configuration_has_the_exit_code_that_is_not_tried_again(unit: Unit) -> None:
    command = shlex.split(unit.value("ExecStart"))
    Path(command[-1]).write_text('source = "s3://bucket"\nmountpoint = "/mnt"\nsiez = 1\n')
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert str(done.returncode) == unit.value("RestartPreventExitStatus")
    assert done.stderr.count("\n") == 1


def test_the_nightly_load(unit: Unit) -> None:
    (unit.site.files / "file").write_text("content")
    unit.load(code=1)  # nothing is mounted
    with unit.started():
        unit.load()
        before = unit.site.origin()["gets"]
        assert before > 0
        assert (unit.site.mountpoint / "file").read_text() == "content"
        assert unit.site.origin()["gets"] == before
