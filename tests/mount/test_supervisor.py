"""The relay's data path as a user meets it: the mount outlives its daemon, and nothing is left."""

import concurrent.futures
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cachefs.config import LIVE
from cachefs.control.client import ask
from cachefs.errors import CachefsError
from cachefs.fuse import relay
from cachefs.mounts import socket_path
from tests.mount.harness import (
    CLI,
    DATA_PATH,
    Site,
    children_of,
    drop_pages,
    eventually,
    is_running,
    kill_daemon,
    standing_still,
)
from tests.servers.suspend import suspend

pytestmark = pytest.mark.skipif(relay.why_not() is not None, reason=f"no relay: {relay.why_not()}")

READERS = 8
KILLS = 20
LONGEST_PAUSE_S = 60.0
"""Generous: the machine may be busy. The bar is 2 s."""


@pytest.fixture
def content(site: Site) -> dict[str, bytes]:
    noise = random.Random(5)
    content = {f"d{n % 3}/{n:02}": noise.randbytes(20_000 + 7_000 * n) for n in range(40)}
    content["large"] = noise.randbytes(3_000_000)
    for name, data in content.items():
        (site.files / name).parent.mkdir(exist_ok=True)
        (site.files / name).write_bytes(data)
    return content


@pytest.fixture
def relayed(site: Site, content: dict[str, bytes]) -> Site:
    site.let_daemons_stand_still()
    site.mount("--data-path", "relay")
    for name, data in content.items():
        assert (site.mountpoint / name).read_bytes() == data
    return site


class Reader(threading.Thread):
    """Reads files, and looks for names that don't exist, until told to stop."""

    def __init__(self, root: Path, content: dict[str, bytes], seed: int) -> None:
        super().__init__()
        self._root, self._content, self._random = root, content, random.Random(seed)
        self.errors: list[str] = []
        self.count = 0
        self.longest_s = 0.0
        self.stopping = False

    def run(self) -> None:
        names = list(self._content)
        while not self.stopping:
            name = self._random.choice(names)
            began = time.monotonic()
            try:
                self._read(name)
            except OSError as error:
                self.errors.append(f"{name}: {error}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1

    def _read(self, name: str) -> None:
        if self._random.random() < 0.3:
            drop_pages(self._root / name)
        if (self._root / name).read_bytes() != self._content[name]:
            self.errors.append(f"{name}: wrong bytes")
        if self._random.random() < 0.1 and (self._root / f"{name}-{self.count}").exists():
            self.errors.append(f"{name}: a name that isn't there")


@contextmanager
def reading(site: Site, content: dict[str, bytes]) -> Iterator[list[Reader]]:
    """No reader has had an error in the end."""
    readers = [Reader(site.mountpoint, content, seed) for seed in range(READERS)]
    for reader in readers:
        reader.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.stopping = True
        for reader in readers:
            reader.join(300)
    assert [error for reader in readers for error in reader.errors] == []
    assert all(reader.count > 0 for reader in readers)
    print(f"{sum(reader.count for reader in readers)} files read,", end=" ")
    print(f"longest pause {max(reader.longest_s for reader in readers):.2f} s")


def serving(site: Site, but_not: int | None = None) -> int:
    """The daemon, once it is another one than `but_not` and serves."""

    found: list[int] = []

    def look() -> bool:
        with suppress(CachefsError):
            report = ask(socket_path(site.mountpoint))
            if report["mounted"] and report["pid"] != but_not:
                found.append(report["pid"])
        return bool(found)

    eventually(look)
    return found[0]


def test_twenty_kills_under_eight_readers(relayed: Site, content: dict[str, bytes]) -> None:
    relayed.expected_trouble = ("was killed by SIGKILL; what is cached is served on",)
    supervisor, dice = relayed.pid(), random.Random(6)
    with reading(relayed, content) as readers:
        for _ in range(KILLS):
            time.sleep(0.1 + dice.random() * 0.4)
            kill_daemon(relayed)
    assert max(reader.longest_s for reader in readers) < LONGEST_PAUSE_S
    assert relayed.pid() == supervisor
    path = relayed.status()["data_path"]
    assert (path["name"], path["restarts"]) == ("relay", KILLS)
    said = relayed.cli("status", relayed.mountpoint).stdout
    assert f"relay, supervised by process {supervisor}; {KILLS} restarts, the last at " in said
    assert "the daemon was killed by SIGKILL" in said
    relayed.umount()
    assert not is_running(supervisor)


def test_a_kernel_that_can_not_send_requests_again(
    site: Site, content: dict[str, bytes], tmp_path: Path
) -> None:
    """Before Linux 6.9. What the dead daemon had not answered fails at once; all else works. The
    kernel asks once more for pages that it wanted ahead of a reader, who notices nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        "from cachefs.supervisor import hang_detection\n"
        "hang_detection.STOPPED_LOOKS = 1 << 30\n"
        "from cachefs.fuse.relay import _relay\n"
        "make = _relay.Relay\n"
        "def pretending(*args):\n"
        "    made = make(*args)\n"
        "    made.pretend_no_resend()\n"
        "    return made\n"
        "_relay.Relay = pretending\n"
    )
    site.environment = {"PYTHONPATH": str(tmp_path)}
    site.expected_trouble = (
        "was killed by SIGKILL; what is cached is served on",
        "this kernel can't send requests again (Linux 6.9 can)",
    )
    site.mount("--data-path", "relay")
    known = sorted(content)[:5]
    unknown = [f"{name}-other" for name in known]
    for name in known:
        assert (site.mountpoint / name).stat().st_size == len(content[name])
    suspend(site.daemon_pid())
    with concurrent.futures.ThreadPoolExecutor(len(known + unknown)) as pool:
        reads = [pool.submit((site.mountpoint / name).read_bytes) for name in known]
        looks = [pool.submit(os.stat, site.mountpoint / name) for name in unknown]
        time.sleep(0.5)
        assert not any(waiting.done() for waiting in reads + looks)
        began = time.monotonic()
        kill_daemon(site)
        errors = [look.exception(300) for look in looks]
        assert time.monotonic() - began < LONGEST_PAUSE_S
        assert [getattr(error, "errno", None) for error in errors] == [errno.EIO] * len(unknown)
        assert [read.result(300) for read in reads] == [content[name] for name in known]
    kill_daemon(site)  # with nothing under way
    for name, data in content.items():
        drop_pages(site.mountpoint / name)
        assert (site.mountpoint / name).read_bytes() == data
    assert not any((site.mountpoint / name).exists() for name in unknown)


def test_an_upgrade_under_readers(relayed: Site, content: dict[str, bytes]) -> None:
    supervisor, daemon = relayed.pid(), relayed.daemon_pid()
    with (relayed.mountpoint / "large").open("rb") as held, reading(relayed, content):
        for _ in range(3):
            said = relayed.cli("upgrade", relayed.mountpoint).stdout
            successor = relayed.daemon_pid()
            assert f"process {successor} serves instead of {daemon}; cachefs " in said
            assert (successor != daemon, relayed.pid()) == (True, supervisor)
            daemon = successor
            assert held.read(100_000) == content["large"][held.tell() - 100_000 : held.tell()]
    assert not [pid for pid in children_of(supervisor) if pid != daemon]
    assert relayed.status()["data_path"]["last_end"] == "was replaced by cachefs upgrade"


def test_cached_files_are_read_while_the_daemon_stands_still(
    relayed: Site, content: dict[str, bytes]
) -> None:
    names = sorted(content)

    def is_known() -> bool:
        """What the daemon was asked for once it was stored, the relay knows."""
        before = relayed.status()["relay"]["missed"]
        for name in names:
            drop_pages(relayed.mountpoint / name)
            (relayed.mountpoint / name).read_bytes()
        return bool(relayed.status()["relay"]["missed"] == before)

    eventually(is_known)
    daemon = relayed.daemon_pid()

    def all_are_read() -> bool:
        for name in names:
            drop_pages(relayed.mountpoint / name)
        with standing_still(daemon):
            read: list[bool] = []

            def read_all() -> None:
                read.extend((relayed.mountpoint / n).read_bytes() == content[n] for n in names)

            thread = threading.Thread(target=read_all)
            thread.start()
            thread.join(20)
            is_done = not thread.is_alive()
        thread.join()
        assert read == [True] * len(names)
        return is_done

    # A READ for which the disk takes more than 250 ms is handed over to the daemon.
    assert any(all_are_read() for _ in range(3))


def test_a_killed_supervisor_leaves_nothing(relayed: Site) -> None:
    relayed.expected_trouble = ("the supervisor is gone; unmounting",)
    supervisor, daemon = relayed.pid(), relayed.daemon_pid()
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not relayed.is_mounted())
    eventually(lambda: not is_running(daemon))
    assert os.listdir(relayed.mountpoint) == []
    relayed.mount("--data-path", "relay")
    assert relayed.origin()["gets"] == 0
    assert len(os.listdir(relayed.mountpoint)) == 4


def mount_breakable(site: Site, tmp_path: Path) -> Path:
    """Mount so that no later daemon starts while the returned file exists."""
    broken = tmp_path / "broken"
    site.environment = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif os.path.exists({str(broken)!r}) and sys.argv[-1].isdecimal():\n"
        "    raise SystemExit(9)\n"
    )
    site.mount("--data-path", "relay")
    return broken


def test_a_daemon_that_can_not_begin_again_ends_the_mount(relayed: Site, tmp_path: Path) -> None:
    relayed.umount()
    relayed.expected_trouble = (" WARNING ", " ERROR ", "Traceback")
    broken = mount_breakable(relayed, tmp_path)
    supervisor = relayed.pid()
    (daemon,) = children_of(supervisor)
    broken.touch()
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: not is_running(supervisor))
    assert not relayed.is_mounted()
    (line,) = (line for line in relayed.log.read_text().splitlines() if "is given up" in line)
    assert "it ended with code" in line


@pytest.mark.parametrize("command", [("umount",), ("fusermount3", "-u")])
def test_whoever_unmounts_both_end_well(
    site: Site, content: dict[str, bytes], command: tuple[str, ...]
) -> None:
    with foreground(site) as process:
        daemon = serving(site)
        subprocess.run([*command, site.mountpoint], check=True)
        assert process.wait(300) == 0
    assert not is_running(daemon)


def test_ctrl_c_in_a_terminal(site: Site) -> None:
    """It goes to all processes of the foreground's group."""
    with foreground(site, start_new_session=True) as process:
        daemon = serving(site)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(300) == 0
    assert not is_running(daemon)
    assert not site.is_mounted()
    assert "Traceback" not in site.log.read_text()


@contextmanager
def foreground(
    site: Site, program: tuple[str, ...] = CLI, **how: bool
) -> Iterator["subprocess.Popen[bytes]"]:
    options = ["--cache-dir", site.cache, "--cache-size", "64MiB", "--free-space-ratio", "0"]
    command = [*program, "mount", "-f", site.source, site.mountpoint, *options]
    with site.log.open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command), "--data-path", "relay"], stderr=log, start_new_session=bool(how)
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(300)


def patched(code: str) -> tuple[str, ...]:
    """The command line with something in it changed."""
    return (sys.executable, "-c", f"{code}\nfrom cachefs.cli import main; main()")


def test_a_stopped_daemon_is_replaced_within_seconds(site: Site, content: dict[str, bytes]) -> None:
    site.expected_trouble = ("was stopped; it is killed", "what is cached is served on")
    with foreground(site):
        daemon = serving(site)
        began = time.monotonic()
        suspend(daemon)
        assert (site.mountpoint / "large").read_bytes() == content["large"]
        print(f"it answered after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 40, "nobody noticed: the promise is 5 s"
        assert serving(site, but_not=daemon) != daemon
    assert not is_running(daemon)


def test_where_there_is_no_relay(site: Site) -> None:
    code = "from cachefs.fuse import relay as r; r._why_not = 'the moon is full'"
    command = [*patched(code), "mount", site.source, site.mountpoint, "--cache-dir", site.cache]
    command += ["--log-file", site.log, "--data-path"]

    def run(data_path: str) -> "subprocess.CompletedProcess[str]":
        args = [*map(str, command), data_path]
        return subprocess.run(args, capture_output=True, text=True, check=False, timeout=300)

    done = run("relay")
    assert done.returncode == 1
    assert done.stderr == (
        "cachefs: error: --data-path relay is not possible here: the moon is full; mend that, or "
        "leave the option out\n"
    )
    assert run("auto").returncode == 0
    assert site.status()["data_path"]["reason"] == "the moon is full"
    assert site.status()["supervisor_pid"] is None
    assert "python (the moon is full)" in site.cli("status", site.mountpoint).stdout


def test_a_relay_that_libfuse_refuses_is_done_without(
    site: Site, content: dict[str, bytes], tmp_path: Path
) -> None:
    """Found out by the daemon only, when the mount is there already."""
    (tmp_path / "sitecustomize.py").write_text(
        "from cachefs.fuse.relay import _relay\n_relay.is_connected = lambda: False\n"
    )
    site.environment = {"PYTHONPATH": str(tmp_path)}
    said = site.refused("--data-path", "relay")
    assert "--data-path relay is not possible here: libfuse was loaded in another way" in said
    assert not site.is_mounted()
    assert site.mount("--data-path", "auto") == ""
    assert (site.mountpoint / "large").read_bytes() == content["large"]
    assert site.status()["data_path"]["name"] == "python"
    assert "libfuse was loaded in another way" in site.status()["data_path"]["reason"]


def test_upgrade_where_it_makes_no_sense(site: Site, tmp_path: Path) -> None:
    for args, code, said in (
        (["upgrade", site.mountpoint], 1, "is not mounted by cachefs"),
        (["upgrade", ""], 2, "the mountpoint is empty"),
        (["upgrade", "--config", tmp_path / "absent"], 2, "can't read the configuration file"),
        (["upgrade", "a", "b"], 2, "unexpected extra argument"),
    ):
        text = site.cli(*args, code=code).stderr
        assert said in text
        assert text.count("\n") == 1
    site.mount("--data-path", "python")
    text = site.cli("upgrade", site.mountpoint, code=1).stderr
    assert "has no supervisor that could replace its daemon" in text
    assert "asked for with --data-path python" in text
    assert f"cachefs umount {site.mountpoint}" in text


def test_an_upgrade_that_fails_is_told(relayed: Site, tmp_path: Path) -> None:
    """The installed version is broken: the one that runs goes on."""
    relayed.umount()
    relayed.expected_trouble = ("the new daemon can't take over", "Traceback")
    broken = mount_breakable(relayed, tmp_path)
    daemon = relayed.daemon_pid()
    broken.touch()
    said = relayed.cli("upgrade", relayed.mountpoint, code=1).stderr
    assert f"the new daemon can't take over, process {daemon} serves on: it ended with" in said
    assert said.count("\n") == 1
    broken.unlink()
    assert relayed.daemon_pid() == daemon
    relayed.cli("upgrade", relayed.mountpoint)
    assert relayed.daemon_pid() != daemon


def test_what_was_changed_while_mounted_outlives_the_daemon(
    site: Site, tmp_path: Path, content: dict[str, bytes]
) -> None:
    site.expected_trouble = ("what is cached is served on",)
    added, removed, log = tmp_path / "added, too", tmp_path / "removed", tmp_path / "access"
    table = '[[tier]]\nmedium = "{}"\npath = ["{}"]\nquota = "64MiB"\nfree_space_ratio = 0\n'
    file = tmp_path / "site.toml"
    tiers = table.format("SSD", site.cache) + table.format("HDD", removed)
    file.write_text(
        f'source = "{site.source}"\nmountpoint = "{site.mountpoint}"\nlog_file = "{site.log}"\n'
        f'data_path = "relay"\nmax_downloads = 7\n{tiers}'
    )
    site.cli("mount", "--config", file)
    site.cli("set", site.mountpoint, "max-downloads=9", "limit-uid=77=1MiB", f"access-log={log}")
    kill_daemon(site)
    serving(site)
    site.cli("tier", "add", site.mountpoint, added, "--medium", "HDD", "--size", "70MiB")
    site.cli("tier", "remove", site.mountpoint, removed)
    site.cli("tier", "resize", site.mountpoint, site.cache, "80MiB")
    removed.rename(tmp_path / "taken out")
    removed.write_text("a disk that is gone")
    before = site.status()
    for _ in range(2):
        kill_daemon(site)
        serving(site)
    after = site.status()
    assert after["limits"] == before["limits"]
    assert after["limits"]["max_downloads"] == 9
    assert after["limits"]["limit_uid"] == {"77": 1 << 20}
    assert after["limits"]["access_log"] == str(log)
    quotas = {tier["path"]: tier["quota_bytes"] >> 20 for tier in after["tiers"]}
    assert quotas == {str(site.cache): 80, str(added): 70}
    assert [tier["high_bytes"] for tier in after["tiers"]] == [
        tier["high_bytes"] for tier in before["tiers"]
    ]
    assert (site.mountpoint / "large").read_bytes() == content["large"]
    eventually(lambda: "/large" in log.read_text())


def another(name: str, value: object, log: Path) -> str:
    """A value of a live option that differs from the present one, as `cachefs set` takes it."""
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int | float):
        return str(int(value * 2) or 1 << 30)
    return {
        "limit_uid": "77=1MiB",
        "access_log": str(log),
        "stale_if_error": "1h",
        "prefetch": "siblings",
        "shared": "127.0.0.1:1",
    }[name]


def test_every_live_option_reaches_the_next_daemon(relayed: Site, tmp_path: Path) -> None:
    relayed.expected_trouble = ("what is cached is served on",)
    log = tmp_path / "access"
    before = relayed.status()["limits"]
    assert before.keys() == {*LIVE, "access_log"}
    changes = {name: another(name, value, log) for name, value in before.items()}
    settings = [f"{name.replace('_', '-')}={value}" for name, value in changes.items()]
    relayed.cli("set", relayed.mountpoint, *settings)
    changed = relayed.status()["limits"]
    assert [name for name in before if before[name] == changed[name]] == []
    kill_daemon(relayed)
    serving(relayed)
    assert relayed.status()["limits"] == changed


def test_umount_while_the_daemon_is_stopped(relayed: Site) -> None:
    supervisor, daemon = relayed.pid(), relayed.daemon_pid()
    suspend(daemon)
    relayed.cli("umount", "--force", relayed.mountpoint)
    assert not relayed.is_mounted()
    eventually(lambda: not is_running(supervisor) and not is_running(daemon))


def test_status_while_there_is_no_daemon(relayed: Site) -> None:
    relayed.expected_trouble = ("what is cached is served on",)
    (daemon,) = children_of(relayed.pid())
    suspend(daemon)
    row = json.loads(relayed.cli("status", relayed.mountpoint, "--json", code=1).stdout)[0]
    assert (row["state"], row["pid"]) == ("not answering", None)
    assert row["supervisor_pid"] == relayed.pid()
    assert "its supervisor" in row["problem"]
    os.kill(daemon, signal.SIGKILL)
    serving(relayed, but_not=daemon)


@pytest.mark.root
def test_root_needs_no_helpers_to_mount(site: Site, content: dict[str, bytes]) -> None:
    """Neither fusermount3 nor mount(8), as in a container with nothing in it."""
    site.environment = {"PATH": "/nonexistent"}
    site.mount("--data-path", "relay")
    assert (site.mountpoint / "large").read_bytes() == content["large"]
    site.umount()
    assert not site.is_mounted()


def test_the_default_is_the_relay(site: Site) -> None:
    site.mount()
    wanted = "python" if DATA_PATH == "python" else "relay"
    assert site.status()["data_path"]["name"] == wanted


def test_a_supervisor_that_is_killed_while_a_daemon_begins_leaves_nothing(relayed: Site) -> None:
    relayed.expected_trouble = ("the supervisor is gone", "what is cached is served on")
    supervisor = relayed.pid()
    (daemon,) = children_of(supervisor)
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: children_of(supervisor) not in ([], [daemon]))
    (successor,) = children_of(supervisor)
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not is_running(successor))
    relayed.cli("umount", "--stale", relayed.mountpoint)  # it may not have known of the mount yet
    assert not relayed.is_mounted()
