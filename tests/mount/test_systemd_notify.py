"""What the daemon tells a service manager, heard on real sockets."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.systemd_notify import NOBODY, ServiceManager, take_over
from tests.mount.harness import CLI, DATA_PATH, Site, eventually
from tests.servers.suspend import suspend

WATCHDOG_S = 0.6


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{address[1:]}" if address[0] == "@" else address)
        receiver.settimeout(300)
        yield receiver


def heard(receiver: socket.socket) -> list[str]:
    return receiver.recv(4096).decode().splitlines()


def drain(receiver: socket.socket) -> None:
    for _ in range(1000):
        heard(receiver)


@contextmanager
def served(
    site: Site, data_path: str = DATA_PATH, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`cachefs mount -f` as a service manager starts it."""
    options = ["--cache-dir", site.cache, "--cache-size", "64MiB", "--free-space-ratio", "0"]
    options += ["--data-path", data_path]
    with site.log.open("wb") as log:
        daemon = subprocess.Popen(
            [*CLI, "mount", "-f", site.source, site.mountpoint, *map(str, options)],
            env=os.environ | variables,
            stderr=log,
        )
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGCONT)
        daemon.terminate()
        daemon.wait(300)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_ready_signs_of_life_and_stopping(site: Site, tmp_path: Path, kind: str) -> None:
    (site.files / "file").write_text("content")
    address = str(tmp_path / "notify") if kind == "path" else f"@cachefs-{os.getpid()}"
    watchdog = str(int(WATCHDOG_S * 1e6))
    with (
        listening(address) as receiver,
        served(site, NOTIFY_SOCKET=address, WATCHDOG_USEC=watchdog) as daemon,
    ):
        first = heard(receiver)
        while first == ["WATCHDOG=1"]:
            first = heard(receiver)
        assert first == ["READY=1", f"STATUS=serving {site.source} on {site.mountpoint}"]
        assert (site.mountpoint / "file").read_text() == "content"
        assert heard(receiver) == heard(receiver) == ["WATCHDOG=1"]
        daemon.terminate()
        while (last := heard(receiver)) == ["WATCHDOG=1"]:
            pass
        assert last[0] == "STOPPING=1"
        assert daemon.wait(300) == 0


def test_a_daemon_that_does_not_turn_gives_no_sign(site: Site, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
    with listening(address) as receiver, served(site, **variables) as daemon:
        while heard(receiver)[0] != "READY=1":
            pass
        suspend(daemon.pid)
        receiver.settimeout(1)
        with pytest.raises(TimeoutError):
            drain(receiver)


@pytest.mark.expect_log("can't tell the service manager")
def test_an_absent_manager_is_no_reason_to_fail(tmp_path: Path) -> None:
    ServiceManager(str(tmp_path / "nobody")).ready("up")


def test_stopping_is_said_when_somebody_else_unmounts(site: Site, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with listening(address) as receiver, served(site, NOTIFY_SOCKET=address) as daemon:
        assert heard(receiver)[0] == "READY=1"  # unwatched: nothing before it
        site.umount()
        assert heard(receiver)[0] == "STOPPING=1"
        assert daemon.wait(300) == 0


def test_a_daemon_in_the_background_is_silent(site: Site, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    site.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}
    with listening(address) as receiver:
        site.mount()
        site.umount()
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(100)


def test_the_variables_are_taken_over_once() -> None:
    variables = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "10", "WATCHDOG_PID": "1", "A": "b"}
    manager = take_over(variables)
    assert variables == {"A": "b"}
    assert manager is not NOBODY
    assert take_over(variables) is NOBODY


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_who_is_watched(variables: dict[str, str], watchdog_s: float | None) -> None:
    manager = take_over({"NOTIFY_SOCKET": "@x", **variables})
    assert manager._watchdog_s == watchdog_s


@pytest.mark.expect_log("neither a path nor an abstract name")
def test_other_kinds_of_addresses_are_refused() -> None:
    assert take_over({"NOTIFY_SOCKET": "vsock:2:1234"}) is NOBODY


def test_a_stuck_loop_shows_where_when_it_is_ended(site: Site) -> None:
    """SIGABRT is what systemd sends to a service that gave no sign of life."""
    with served(site, "python") as daemon:
        eventually(site.is_mounted)
        daemon.send_signal(signal.SIGABRT)
        assert daemon.wait(300) == -signal.SIGABRT
    assert "File " in site.log.read_text()
    site.expected_trouble += ("Fatal Python error",)
