"""Many readers at once against a server that can't have it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site, eventually
from tests.servers.fault_proxy import FaultProxy
from tests.servers.seaweedfs import SeaweedFS
from tests.servers.suspend import suspend

READERS = 32
FILES = 400
FILE_BYTES = 20_000
LIMIT = 16
LATENCY_S = 0.01

READER = """
import os, sys
root, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = sorted(os.listdir(root))[first::step]
print("ready", flush=True)
sys.stdin.readline()
for name in names:
    with open(os.path.join(root, name), "rb") as file:
        assert file.read() == (name.encode() * 5000)[:%d], "wrong bytes"
"""


@pytest.fixture
def crowded(tmp_path: Path, seaweedfs: SeaweedFS) -> Iterator[tuple[Site, FaultProxy]]:
    """A mount of a server that refuses more than `LIMIT` requests at one time."""
    bucket = seaweedfs.make_bucket("storm")
    names = [f"{number:04}" for number in range(FILES)]
    seaweedfs.put_many(bucket, {name: (name.encode() * 5000)[:FILE_BYTES] for name in names})
    site = Site(tmp_path, f"s3://{bucket}")
    site.expected_trouble = (" cachefs.origin",)
    site.options = PATIENT
    with FaultProxy(seaweedfs.endpoint) as proxy:
        site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
        proxy.limit(LIMIT, LATENCY_S)
        yield site, proxy
        site.tear_down()


def test_a_storm_of_readers_is_served_without_a_storm_of_requests(
    crowded: tuple[Site, FaultProxy],
) -> None:
    site, proxy = crowded
    site.mount()
    assert len(os.listdir(site.mountpoint)) == FILES
    readers = [
        subprocess.Popen(
            [
                *(sys.executable, "-S", "-E", "-c", READER % FILE_BYTES),
                *(site.mountpoint, str(number), str(READERS)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(READERS)
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    before = proxy.counts()
    began = time.monotonic()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    failures = [reader.communicate(timeout=300)[1] for reader in readers]
    seconds = time.monotonic() - began
    after = proxy.counts()
    sent, rejected = after.requests - before.requests, after.rejected - before.rejected
    print(f"{FILES} files in {seconds:.2f} s; {sent} requests, {rejected} rejected")
    assert not any(failures), failures
    assert all(reader.returncode == 0 for reader in readers)
    assert sent <= 1.3 * FILES


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Path]:
    """What the kernel tells root about its FUSE mounts."""
    place = tmp_path / "connections"
    place.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "fusectl", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
def test_look_ups_in_one_directory_do_not_wait_for_each_other(
    site: Site, connections: Path
) -> None:
    """The kernel would send one at a time to a daemon that doesn't say that it can take more."""
    (site.files / "d").mkdir()
    site.let_daemons_stand_still()
    site.mount()
    names = [site.mountpoint / "d" / f"{number}" for number in range(READERS)]
    assert not names[0].exists()
    connection = connections / str(os.minor(os.stat(site.mountpoint).st_dev))
    eventually(lambda: int((connection / "congestion_threshold").read_text()) == 960)
    assert int((connection / "max_background").read_text()) == 1024
    looks = [threading.Thread(target=name.exists) for name in names[1:]]
    daemon = site.daemon_pid()
    suspend(daemon)
    try:
        for look in looks:
            look.start()
        eventually(lambda: int((connection / "waiting").read_text()) >= len(looks))
    finally:
        os.kill(daemon, signal.SIGCONT)
    for look in looks:
        look.join(10)
