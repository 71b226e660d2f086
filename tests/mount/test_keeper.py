"""A keeper holds a mount while its processes are replaced: readers wait, and nothing fails."""

import errno
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cachefs.fuse import relay
from cachefs.mounts import find_entry, find_mount
from cachefs.supervisor.channel import Channel
from tests.mount.harness import CLI, Site, children_of, crash, drop_pages, eventually
from tests.mount.namespaces import CACHEFS, MountNamespace
from tests.servers.suspend import suspend

pytestmark = pytest.mark.skipif(relay.why_not() is not None, reason=f"no relay: {relay.why_not()}")

LONGEST_PAUSE_S = 60.0
"""Generous: the machine may be busy. The bar is 3 s; `python -m bench.outlives` measures it."""

ORPHANED = ("the supervisor is gone; the keeper has the mount",)
"""What a daemon may log whose supervisor was killed a moment before it."""

READER = """
import hashlib, json, os, random, sys, time
root, stop, known = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
names, dice = sorted(known), random.Random(os.getpid())
reads, longest, errors = 0, 0.0, []
print("begun", flush=True)
while not os.path.exists(stop):
    name, began = dice.choice(names), time.monotonic()
    try:
        with open(f"{root}/{name}", "rb") as file:
            data = file.read()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if hashlib.sha256(data).hexdigest() != known[name]:
            errors.append(f"{name}: wrong bytes")
    except OSError as error:
        errors.append(str(error))
    reads, longest = reads + 1, max(longest, time.monotonic() - began)
print(json.dumps({"reads": reads, "longest_s": longest, "errors": errors}))
"""


class KeeperProcess:
    """`cachefs keeper`, listening at `path`."""

    def __init__(self, path: Path, log: Path, wait: str, within: list[str] | None = None) -> None:
        self.path, self._log, self._wait, self._within = path, log, wait, within or []
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [*self._within, *CLI, "keeper", "--socket", str(self.path)]
            self._process = subprocess.Popen([*command, "--wait", self._wait], stderr=log)
        eventually(self._listens)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(str(self.path)) == 0

    def said(self, what: str) -> int:
        return self._log.read_text().count(what)

    def end(self, number: int = signal.SIGTERM) -> int:
        self._process.send_signal(number)
        return self._process.wait(60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def keeper(site: Site) -> Iterator[KeeperProcess]:
    yield from started(site, "10m")


@pytest.fixture
def hasty_keeper(site: Site) -> Iterator[KeeperProcess]:
    yield from started(site, "1s")


def started(site: Site, wait: str) -> Iterator[KeeperProcess]:
    root = site.files.parent
    keeper = KeeperProcess(root / "keeper", root / "keeper.log", wait)
    site.options = ("--keeper", str(keeper.path))
    site.expected_trouble += ORPHANED
    yield keeper
    if site.is_mounted():
        subprocess.run(["fusermount3", "-uz", str(site.mountpoint)], check=False)
    eventually(lambda: not site.is_running())
    keeper.end()
    print(f"--- log of the keeper\n{(root / 'keeper.log').read_text()}---")


@pytest.fixture
def content(site: Site) -> dict[str, str]:
    """Digests of the files of the source."""
    noise = random.Random(7)
    known = {}
    for number in range(60):
        data = noise.randbytes(3_000 * number + 1)
        (site.files / f"{number:02}").write_bytes(data)
        known[f"{number:02}"] = hashlib.sha256(data).hexdigest()
    return known


@contextmanager
def reading(site: Site, known: dict[str, str], within: list[str] | None = None) -> Iterator[None]:
    """Four processes read all the while, and none of them has an error in the end."""
    root = site.files.parent
    stop, digests = root / "stop", root / "digests"
    digests.write_text(json.dumps(known))
    command = [*(within or []), sys.executable, "-c", READER, str(site.mountpoint / "."), str(stop)]
    readers = [
        subprocess.Popen([*command, str(digests)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "begun\n"
        yield
    finally:
        stop.touch()
        said = [reader.communicate(timeout=300)[0] for reader in readers]
        stop.unlink()
    results = [json.loads(text) for text in said]
    assert [result["errors"] for result in results] == [[]] * 4
    assert all(result["reads"] > 0 for result in results)
    assert max(result["longest_s"] for result in results) < LONGEST_PAUSE_S


def device_of(site: Site) -> str:
    mount = find_mount(site.mountpoint)
    assert mount is not None
    return mount.device


def crash_all(site: Site) -> None:
    """As the end of a container: supervisor and daemon are killed together."""
    pids = [site.pid(), *children_of(site.pid())]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not site.is_running())


def test_a_replaced_mount_goes_on_under_readers(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    site.mount()
    device = device_of(site)
    with (site.mountpoint / "59").open("rb") as held, reading(site, content):
        held.read(1)
        for how in ("SIGTERM", "kill", "SIGTERM"):
            if how == "kill":
                crash_all(site)
            else:
                site.signal(signal.SIGTERM)
            site.mount()
            assert device_of(site) == device
        held.seek(0)
        assert hashlib.sha256(held.read()).hexdigest() == content["59"]
    path = site.status()["data_path"]
    assert path["name"] == "relay"
    site.umount()
    assert find_mount(site.mountpoint) is None
    site.mount()  # the keeper has forgotten the old one
    assert device_of(site)
    assert (site.mountpoint / "00").read_bytes() == (site.files / "00").read_bytes()


def pretend_an_old_kernel(site: Site) -> None:
    """Before Linux 6.9, the kernel can't send requests again."""
    site.customize(
        "from cachefs.fuse.relay import _relay\n"
        "make = _relay.Relay\n"
        "def pretending(*args):\n"
        "    made = make(*args)\n"
        "    made.pretend_no_resend()\n"
        "    return made\n"
        "_relay.Relay = pretending\n"
    )


def test_an_old_kernel_continues_what_was_left_in_order(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    pretend_an_old_kernel(site)
    site.mount()
    device = device_of(site)
    with (site.mountpoint / "59").open("rb") as held, reading(site, content):
        held.read(1)
        for _ in range(3):
            site.signal(signal.SIGTERM)
            site.mount()
            assert device_of(site) == device
        held.seek(0)
        assert hashlib.sha256(held.read()).hexdigest() == content["59"]


def test_an_old_kernel_loses_requests_of_killed_processes(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    """So the mount ends, and nobody waits for ever."""
    pretend_an_old_kernel(site)
    site.mount()
    crash_all(site)
    eventually(lambda: keeper.said("can't send its requests again") == 1)
    eventually(lambda: find_mount(site.mountpoint) is None)
    site.mount()
    assert (site.mountpoint / "03").read_bytes() == (site.files / "03").read_bytes()


def test_an_old_kernel_waits_for_answers_for_a_while(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    """A request that a standing daemon does not answer fails in the end."""
    pretend_an_old_kernel(site)
    site.expected_trouble += ("was stopped; it is killed", "no heartbeat")
    site.mount()
    device, daemon = device_of(site), site.daemon_pid()
    suspend(daemon)
    failed: list[OSError | None] = []

    def look() -> None:
        try:
            (site.mountpoint / "unknown").exists()
            failed.append(None)
        except OSError as error:
            failed.append(error)

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    site.signal(signal.SIGTERM)
    site.mount()
    reader.join(60)
    assert not reader.is_alive()
    assert failed[0] is None or failed[0].errno == errno.EIO
    assert device_of(site) == device
    assert (site.mountpoint / "03").read_bytes() == (site.files / "03").read_bytes()


def test_requests_wait_for_the_next_mount(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    site.mount()
    (site.mountpoint / "01").read_bytes()
    site.signal(signal.SIGTERM)
    found: list[object] = []

    def look() -> None:
        drop_pages(site.mountpoint / "01")
        found.append((site.mountpoint / "01").read_bytes())
        found.append((site.mountpoint / "unknown").exists())

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    reader.join(0.5)
    assert reader.is_alive()
    assert len(found) < 2
    site.mount()
    reader.join(60)
    assert found == [(site.files / "01").read_bytes(), False]


def test_a_mount_that_nobody_continues_ends(site: Site, hasty_keeper: KeeperProcess) -> None:
    site.mount()
    site.signal(signal.SIGTERM)
    eventually(lambda: find_mount(site.mountpoint) is None)
    assert hasty_keeper.said("nobody has served") == 1
    (site.files / "new").write_text("new")
    site.mount()
    assert (site.mountpoint / "new").read_text() == "new"


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_ctrl_c_and_umount_unmount(
    site: Site, keeper: KeeperProcess, number: signal.Signals | None
) -> None:
    site.mount()
    if number is None:
        site.umount()
    else:
        site.signal(number)
    assert find_mount(site.mountpoint) is None
    assert keeper.said("waits") == 0


def test_an_umount_while_nobody_serves(site: Site, keeper: KeeperProcess) -> None:
    site.mount()
    site.signal(signal.SIGTERM)
    said = site.cli("umount", site.mountpoint, code=1).stderr
    assert "does not answer" in said
    assert "--force" in said
    site.cli("umount", "--force", site.mountpoint)
    eventually(lambda: keeper.said("was unmounted") == 1)
    site.mount()
    assert site.mountpoint.stat().st_ino


def test_a_mount_that_waits_is_not_called_another_users(site: Site, keeper: KeeperProcess) -> None:
    site.mount()
    site.signal(signal.SIGTERM)
    (row,) = [
        row
        for row in json.loads(site.cli("status", "--json").stdout)
        if row["mountpoint"] == str(site.mountpoint)
    ]
    assert row["state"] == "not known here"
    assert "a keeper may hold it" in row["problem"]
    site.mount()


def test_another_view_ends_the_old_mount(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    """Other inode numbers would give the kernel's old pages to other files."""
    site.expected_trouble += ("files that were open there fail",)
    site.mount()
    device = device_of(site)
    before = site.cache
    site.signal(signal.SIGTERM)
    site.cache = site.cache.with_name("another")
    said = site.mount()
    assert "the first cache directory is another one" in said
    assert (site.mountpoint / "07").read_bytes() == (site.files / "07").read_bytes()
    site.umount()
    site.cache = before
    site.mount()
    assert device_of(site) or device


def test_a_keeper_that_is_away_or_comes_back(
    site: Site, keeper: KeeperProcess, content: dict[str, str]
) -> None:
    site.expected_trouble += ("no keeper answers at",)
    assert keeper.end() == 0
    assert "no keeper answers" in site.mount()
    keeper.start()
    eventually(lambda: keeper.said("is kept") == 1)  # found without being told
    keeper.end(signal.SIGKILL)
    keeper.start()
    eventually(lambda: keeper.said("is kept") == 2)
    device = device_of(site)
    site.signal(signal.SIGTERM)
    site.mount()
    assert device_of(site) == device
    keeper.end()
    eventually(lambda: site.log.read_text().count("no keeper answers at") == 3)
    site.signal(signal.SIGTERM)  # as without a keeper
    assert find_mount(site.mountpoint) is None
    keeper.start()


def test_a_keeper_refuses_nonsense(site: Site, keeper: KeeperProcess, tmp_path: Path) -> None:
    site.mount()
    good = {"mountpoint": "/x", "view": "v", "device": "0:1", "init": "AAAA"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(keeper.path))
        raw.send(b"\xff{")
        assert raw.recv(100) == b""
    for message in ({"keep": good}, {"keep": []}, {"take": {"mountpoint": 1}}, {"leave": 1}, []):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw, open(os.devnull) as null:
            raw.connect(str(keeper.path))
            raw.settimeout(60)
            socket.send_fds(raw, [json.dumps(message).encode()], [null.fileno()])
            if message in ({"keep": []}, []):
                raw.shutdown(socket.SHUT_WR)
                data = raw.recv(4096)
                assert data == b"" or b"error" in data
            else:
                assert b"error" in raw.recv(4096)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(keeper.path))
        channel = Channel(raw)
        channel.send({"take": {"mountpoint": str(site.mountpoint), "view": "v"}})
        assert channel.receive() == ({"busy": True}, [])
    assert keeper.path.stat().st_mode & 0o777 == 0o600
    said = site.cli("keeper", "--socket", keeper.path, code=1).stderr
    assert "another keeper listens" in said
    assert "--wait" in site.cli("keeper", "--wait", "soon", code=2).stderr
    site.signal(signal.SIGTERM)
    site.mount()


class Node:
    """A host with containers: one mounts, the keeper is in a second one, and readers are in a third
    one."""

    def __init__(self, site: Site, stack: ExitStack) -> None:
        self._site, self._stack = site, stack
        site.expected_trouble += ORPHANED
        shared, root = site.mountpoint, site.files.parent
        self.host = self._container("private")
        self.host.run("mount", "--bind", shared, shared)
        self.host.run("mount", "--make-rshared", shared)
        site.mountpoint = shared / "data"
        site.mountpoint.mkdir()
        self.pod = self._container("slave", self.host)
        self.keeps = self._container("unchanged", self.host)
        within = self.keeps.enter()
        self.keeper = KeeperProcess(root / "keeper", root / "keeper.log", "10m", within)
        stack.callback(self.keeper.end)

    def _container(self, propagation: str, within: MountNamespace | None = None) -> MountNamespace:
        namespace = MountNamespace(propagation, within)
        self._stack.callback(namespace.close)
        return namespace

    def mount(self) -> MountNamespace:
        site = self._site
        cache = ("--cache-dir", site.cache, "--cache-size", "256MiB", "--free-space-ratio", "0")
        options = (*cache, "--log-file", site.log, "--keeper", self.keeper.path)
        mounts = self._container("unchanged", self.host)
        mounts.run(CACHEFS, "mount", site.source, site.mountpoint, *options)
        return mounts

    def end(self, number: signal.Signals) -> None:
        """End all processes of the mount."""
        entry = find_entry(self._site.mountpoint)
        assert entry is not None
        pids = [entry.pid, *(children_of(entry.pid) if number == signal.SIGKILL else [])]
        for pid in pids:
            os.kill(pid, number)
        eventually(lambda: not self._site.is_running())

    def replace(self, number: signal.Signals) -> MountNamespace:
        self.end(number)
        return self.mount()

    def is_mounted(self) -> bool:
        """Whether a pod sees the mount. Does not access it."""
        return str(self._site.mountpoint) in self.pod.run("cat", "/proc/self/mountinfo")


@pytest.fixture
def node(site: Site, stack: ExitStack) -> Node:
    return Node(site, stack)


def test_a_replaced_container_is_a_pause_for_other_containers(
    site: Site, node: Node, content: dict[str, str]
) -> None:
    node.mount()
    with reading(site, content, node.pod.enter()):
        node.replace(signal.SIGTERM)
        node.replace(signal.SIGKILL)
        last = node.replace(signal.SIGTERM)
    last.run(CACHEFS, "umount", site.mountpoint)
    assert node.pod.run("ls", site.mountpoint) == ""
    entry = find_entry(site.mountpoint)
    if entry is not None and entry.alive:
        crash(entry.pid)


def test_a_mount_ends_on_all_containers_with_its_daemon_and_then_the_keeper(
    site: Site, node: Node, content: dict[str, str]
) -> None:
    """As docs/KUBERNETES.md ends one: the DaemonSet is deleted, and the keeper replaced."""
    node.mount()
    node.end(signal.SIGTERM)
    assert node.is_mounted()  # the kernel makes readers wait
    assert node.keeper.end() == 0
    assert not node.is_mounted()
    assert node.pod.run("ls", site.mountpoint) == ""
    node.keeper.start()
