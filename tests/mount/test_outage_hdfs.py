"""A mount of a real HDFS whose NameNode and DataNode are killed and paused."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Site
from tests.mount.outage import (
    AT_ONCE_S,
    COLD,
    EIO_S,
    KILLED_S,
    LONG_PATIENCE,
    PATIENCE_S,
    SHORT_TTLS,
    TROUBLE,
    TURNS,
    Outage,
    objects,
)
from tests.servers.hdfs import Hdfs
from tests.servers.ports import wait_until
from tests.servers.suspend import suspend

pytestmark = pytest.mark.timeout(600)  # Hadoop is downloaded the first time ever

ROOT = "/outage"
NAMES = COLD[:200]


class Servers:
    """Takes the servers away and brings them back."""

    def __init__(self, hdfs: Hdfs) -> None:
        self._hdfs = hdfs

    def kill_datanode(self) -> None:
        assert self._hdfs.datanode is not None
        self._hdfs.datanode.kill()
        self._hdfs.datanode.wait()

    def kill_namenode(self) -> None:
        assert self._hdfs.namenode is not None
        self._hdfs.namenode.kill()
        self._hdfs.namenode.wait()

    def pause_both(self) -> None:
        for process in (self._hdfs.namenode, self._hdfs.datanode):
            if process is not None and process.poll() is None:
                suspend(process.pid)

    def bring_back(self) -> None:
        """Returns when a file can be read, by somebody else."""
        self._signal(signal.SIGCONT)
        if self._has_ended(self._hdfs.namenode):
            self._hdfs.start_namenode()
        if self._has_ended(self._hdfs.datanode):
            self._hdfs.start_datanode()
        wait_until(self._is_readable, 180, "HDFS doesn't come back")

    def _signal(self, number: signal.Signals) -> None:
        for process in (self._hdfs.namenode, self._hdfs.datanode):
            if process is not None and process.poll() is None:
                process.send_signal(number)

    @staticmethod
    def _has_ended(process: subprocess.Popen[bytes] | None) -> bool:
        return process is None or process.poll() is not None

    def _is_readable(self) -> bool:
        """The NameNode answers and sends us to the DataNode, which answers too."""
        hdfs = self._hdfs
        question = f"{ROOT}/{NAMES[0]}?op=OPEN&length=1&user.name={hdfs.user}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError):
            address = f"http://{hdfs.http_address}/webhdfs/v1{question}"
            with opener.open(address, timeout=2) as answer:
                return len(answer.read()) == 1
        return False


@pytest.fixture(scope="module")
def servers(hdfs: Hdfs) -> Iterator[Servers]:
    servers = Servers(hdfs)
    yield servers
    servers.bring_back()  # others use them too
    hdfs.delete(ROOT)


@pytest.fixture(scope="module")
def files(hdfs: Hdfs, servers: Servers) -> None:
    hdfs.put_many((f"{ROOT}/{name}", data) for name, data in objects(NAMES).items())


@contextlib.contextmanager
def mounted_on(root: Path, hdfs: Hdfs, servers: Servers, *options: str) -> Iterator[Outage]:
    site = Site(root, f"{hdfs.url}{ROOT}")
    site.environment = hdfs.environment
    site.expected_trouble = TROUBLE
    site.mount(*SHORT_TTLS, *options)
    try:
        yield Outage(site, NAMES)
    finally:
        servers.bring_back()
        site.tear_down()


@pytest.fixture(scope="module")
def mounted(
    tmp_path_factory: pytest.TempPathFactory, hdfs: Hdfs, servers: Servers, files: None
) -> Iterator[Outage]:
    with mounted_on(tmp_path_factory.mktemp("outage"), hdfs, servers) as outage:
        outage.prepare()
        yield outage


@pytest.fixture
def patient(tmp_path: Path, hdfs: Hdfs, servers: Servers, files: None) -> Iterator[Outage]:
    """A mount whose readers wait for a long time."""
    with mounted_on(tmp_path, hdfs, servers, *LONG_PATIENCE) as outage:
        outage.settle()
        yield outage


@pytest.fixture
def outage(mounted: Outage, servers: Servers) -> Iterator[Outage]:
    mounted.settle()
    yield mounted
    servers.bring_back()


@pytest.mark.parametrize(
    "happens", [Servers.kill_datanode, Servers.kill_namenode, Servers.pause_both]
)
def test_an_outage_costs_only_what_is_not_cached(
    outage: Outage, servers: Servers, happens: Callable[[Servers], None]
) -> None:
    what = happens.__name__
    with outage.cold_reader(what) as reader:
        happens(servers)
        reader.go()
        outage.check_cached(what)
    if happens is not Servers.kill_datanode:  # then the NameNode still answers
        outage.check_fails_at_once(what)
    servers.bring_back()
    outage.check_recovery(what)


def test_a_short_pause_is_invisible(outage: Outage, servers: Servers) -> None:
    for _ in range(TURNS):
        reader = outage.open(outage.next_cold())
        servers.pause_both()
        reader.go()
        time.sleep(1)
        servers.bring_back()
        failure, seconds = reader.result()
        print(f"paused for a second: {os.strerror(failure)} after {seconds:.2f} s")
        assert seconds < EIO_S
        if failure == 0 or seconds < AT_ONCE_S:
            break
        # The servers took the rest of the reader's patience to come back.
        outage.settle()
    assert failure == 0


def test_a_reader_that_waits_for_paused_servers_can_be_killed(
    patient: Outage, servers: Servers
) -> None:
    script = "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); print(); os.read(fd, 100)"
    path = patient.root / patient.next_cold()
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", "import sys; sys.stdin.readline(); " + script, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as reader:
        path.stat()  # known for the next second
        servers.pause_both()
        assert reader.stdin is not None
        reader.stdin.write(b"go\n")
        reader.stdin.flush()
        time.sleep(1)
        began = time.monotonic()
        reader.kill()
        reader.wait(PATIENCE_S)
    seconds = time.monotonic() - began
    print(f"killed: gone after {seconds:.2f} s")
    servers.bring_back()
    assert reader.returncode == -9, "its read had ended"
    assert seconds < KILLED_S
    patient.settle()
