"""What others see of a running mount: control socket, metrics, health."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs.control import api
from cachefs.control.api import Route
from cachefs.control.client import ask
from cachefs.metrics import METRICS, OF_SHARED, OF_WRITES
from cachefs.mounts import socket_path
from tests.mount.harness import DATA_PATH, MIB, Site, drop_pages, eventually
from tests.mount.outage import SHORT_TTLS, TROUBLE
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

READERS = 64

STILL = {
    "cachefs_info",
    "process_start_time_seconds",
    "cachefs_tier_rejected_blocks_total",  # by chance only with this policy: the next test
    "cachefs_origin_skipped_keys_total",  # keys that this server doesn't take
    # These need --passthrough: tests/mount/test_passed_through.py looks at them.
    "cachefs_relay_opens_total",
    "cachefs_relay_opens_passed_through_total",
    # These need a broken disk or a crash: tests/cache has those, and looks at the same counters.
    "cachefs_tier_health",
    "cachefs_tier_adopted_blocks_total",
    "cachefs_tier_bad_blocks_total",
    "cachefs_tier_bad_slabs_total",
    "cachefs_tier_bad_indexes_total",
    "cachefs_tier_bad_rows_total",
    "cachefs_namespace_bad_rows_total",
    "cachefs_tier_read_errors_total",
    "cachefs_tier_write_errors_total",
}
"""What no load moves."""

_READ_ALL = """
import os, sys, threading
def read(path):
    try:
        open(path, "rb").read()
    except OSError:
        pass
threads = [threading.Thread(target=read, args=[path], daemon=True) for path in sys.argv[1:]]
for thread in threads:
    thread.start()
print("go", flush=True)
for thread in threads:
    thread.join()
"""


class Watch:
    """What `/metrics` said, over time: all different values by name."""

    def __init__(self, site: Site) -> None:
        self.url = f"http://{site.status()['metrics']}"
        self.values: dict[str, set[tuple[tuple[str, ...], float]]] = defaultdict(set)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def look(self) -> None:
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=300).text
        for family in text_string_to_metric_families(text):
            suffix = "_total" if family.type == "counter" else ""
            for sample in family.samples:
                labels = tuple(v for k, v in sample.labels.items() if k != "le")
                self.values[family.name + suffix].add((labels, sample.value))

    def _run(self) -> None:
        while not self._stopped.wait(0.1):  # parsing costs CPU time
            self.look()

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()

    def moved(self) -> set[str]:
        """Names of metrics that have had two values under the same labels."""
        found = set()
        for name, seen in list(self.values.items()):
            values = defaultdict(set)
            for labels, value in list(seen):  # others are added meanwhile
                values[labels].add(value)
            if any(len(each) > 1 for each in values.values()):
                found.add(name)
        return found


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS) -> str:
    bucket = seaweedfs.make_bucket("metrics")
    noise = random.Random(3).randbytes(4 * MIB)
    seaweedfs.put_many(bucket, {f"large/{number:02}": noise for number in range(45)})
    seaweedfs.put_many(bucket, {f"cold/{number:03}": b"x" * 9_000 for number in range(520)})
    seaweedfs.put_many(bucket, {f"later/{number}/x": b"z" for number in range(9)})
    return bucket


@pytest.fixture(scope="module")
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def origin_site(
    tmp_path: Path, seaweedfs: SeaweedFS, proxy: FaultProxy, bucket: str
) -> Iterator[Site]:
    """For S3 through the proxy."""
    site = Site(tmp_path, f"s3://{bucket}")
    site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    site.expected_trouble = TROUBLE
    yield site
    proxy.clear()
    site.tear_down()


@contextlib.contextmanager
def reading(paths: list[Path]) -> Iterator[subprocess.Popen[str]]:
    """A process with one thread for each, from when they are about to read. Whether it is done at
    the end or not, it ends then."""
    command = [sys.executable, "-S", "-E", "-c", _READ_ALL, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        try:
            yield process
        finally:
            process.kill()


def test_every_metric_moves_under_load(origin_site: Site, proxy: FaultProxy) -> None:
    site, root = origin_site, origin_site.mountpoint
    memory = site.cache.with_name("mem")
    site.mount(
        *SHORT_TTLS,
        *("--mem-size", "64MiB", "--mem-dir", memory),
        *("--cache-size", "64MiB", "--cache-eviction", "lru", "--verify", "full", "--hedge"),
        *("--max-downloads", "16"),
    )
    large = sorted((root / "large").iterdir())
    # Backwards: in name order they would be fetched ahead, and no outage would cost a fetch.
    cold = iter(sorted((root / "cold").iterdir(), reverse=True))
    with Watch(site) as watch:
        for path in (*large, *large[-12:] * 4):
            path.read_bytes()
            drop_pages(path)
        for path in (root / "cold").iterdir():  # names of all
            path.stat()
        assert not (root / "nothing").exists()
        for _ in range(220):  # what a hedge goes by
            next(cold).read_bytes()
        proxy.limit(None, latency_s=0.8)
        for _ in range(4):  # every other one is late, and while nobody else reads slots are free
            next(cold).read_bytes()
        for _ in range(4):  # a queue is short, and a busy machine looks at it rarely
            with reading([next(cold) for _ in range(40)]) as readers:
                readers.wait(300)
            if "cachefs_origin_requests_queued" in watch.moved():
                break
        site.cli("load", next(cold), "--detach")
        eventually(lambda: "cachefs_load_jobs" in watch.moved())
        proxy.limit(None)
        site.cli("pin", root / "large/44")
        site.cli("tier", "resize", root, memory, "128MiB")
        time.sleep(1.2)  # blocks that have just moved stay where they are
        for path in large[-24:] * 2:  # room above: up they go
            path.read_bytes()
            drop_pages(path)
        for fault in (Fault.BUSY, Fault.CUT):
            proxy.fault(fault, times=3)
            next(cold).read_bytes()
        for number in range(9):
            proxy.fault(Fault.TRICKLE, times=1, objects_only=True)
            (root / "later" / str(number) / "x").read_bytes()
        proxy.fault(Fault.REFUSE)
        with reading([next(cold) for _ in range(20)]) as readers:
            readers.wait(300)
        eventually(lambda: "cachefs_origin_breaker_open" in watch.moved())
        eventually(lambda: bool(os.listdir(root / "cold")) and "cachefs_stale" in watch.moved())
        proxy.clear()
    everything = {metric.name for metric in METRICS} - OF_WRITES - OF_SHARED
    still = STILL | {name for name in everything if "_relay_" in name and DATA_PATH == "python"}

    def all_moved() -> bool:
        watch.look()
        return everything - watch.moved() <= still

    with contextlib.suppress(AssertionError):
        eventually(all_moved, 10)  # moves between tiers may be under way
    assert everything - watch.moved() - still == set(), "these never moved"
    assert watch.values.keys() - OF_SHARED == everything


def test_the_metrics_of_writes_move(site: Site) -> None:
    site.expected_trouble = ("it stays in the spool",)
    site.mount("--rw")
    watch = Watch(site)
    watch.look()
    with (site.mountpoint / "file").open("wb") as stream:
        stream.write(b"x" * 10_000)
        stream.flush()
        watch.look()
    watch.look()
    still = {"cachefs_spool_limit_bytes", "cachefs_origin_write_errors_total"}
    assert OF_WRITES - watch.moved() == still


def test_blocks_that_are_not_kept_are_counted(site: Site) -> None:
    for number in range(80):
        (site.files / str(number)).write_bytes(os.urandom(MIB))
    site.mount("--cache-size", "64MiB", "--cache-eviction", "none")
    for path in site.mountpoint.iterdir():
        path.read_bytes()

    def are_counted() -> bool:
        """A block is stored or rejected after the reader has it."""
        watch = Watch(site)
        watch.look()
        ((labels, value),) = watch.values["cachefs_tier_rejected_blocks_total"]
        assert labels in {("SSD", str(site.cache)), (str(site.cache), "SSD")}
        return value > 10

    eventually(are_counted)


def test_health_while_64_readers_wait_for_a_silent_origin(
    origin_site: Site, proxy: FaultProxy
) -> None:
    site = origin_site
    site.mount("--read-timeout", "200s", "--request-timeout", "100s")
    url = f"http://{site.status()['metrics']}"
    names = sorted((site.mountpoint / "cold").iterdir())[:READERS]
    proxy.fault(Fault.SILENCE, objects_only=True)
    with reading(names):
        waiting = "cachefs_fuse_requests_waiting 64.0"
        eventually(
            lambda: waiting in httpx.get(f"{url}/metrics", trust_env=False, timeout=300).text
        )
        for path in ("/healthz", "/readyz", "/metrics"):
            times_s = []
            with httpx.Client(trust_env=False, timeout=300) as client:
                for _ in range(20):
                    began = time.monotonic()
                    assert client.get(url + path).status_code == 200
                    times_s.append(time.monotonic() - began)
            times_s.sort()
            print(f"{path}: median {times_s[10] * 1e3:.1f} ms, worst {times_s[-1] * 1e3:.1f} ms")
            assert times_s[10] < 2, "some ms, on a quiet machine"
        assert waiting in httpx.get(f"{url}/metrics", trust_env=False, timeout=300).text
    proxy.clear()


def test_the_control_socket(site: Site) -> None:
    (site.files / "file").write_bytes(b"x" * 1000)
    site.mount("--metrics", "127.0.0.1:0")
    (site.mountpoint / "file").read_bytes()
    socket = socket_path(site.mountpoint)
    routes = [str(route) for route in vars(api).values() if isinstance(route, Route)]
    assert ask(socket, api.INDEX)["routes"] == sorted(routes)
    assert ask(socket)["origin"]["gets"] == 1
    assert ask(socket, api.SETTINGS)["max_downloads"] == 64
    (tier,) = ask(socket, api.TIERS)["tiers"]
    assert tier["path"] == str(site.cache)
    shown = site.cli("status", site.mountpoint).stdout
    assert f"METRICS        http://{site.status()['metrics']}/metrics" in shown


def test_addresses(site: Site) -> None:
    site.mount("--metrics", "off")
    assert site.status()["metrics"] is None
    site.umount()
    site.mount()
    address = site.status()["metrics"]
    assert httpx.get(f"http://{address}/readyz", trust_env=False).text == "ok\n"
    root = site.mountpoint.parent / "other"
    root.mkdir()
    other = Site(root)
    try:
        assert f"can't listen on {address} for metrics" in other.refused("--metrics", address)
        other.mount()
        assert other.status()["metrics"] not in {None, address}
    finally:
        other.tear_down()
