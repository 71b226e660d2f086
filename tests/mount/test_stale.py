"""`--stale-if-error` through the kernel: what is shown while a real S3 server does not answer."""

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually
from tests.mount.outage import PATIENCE_S, SHORT_TTLS, TROUBLE
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

NAMES = [f"{number:04}" for number in range(1000)]
ONE_DEADLINE_S = 120
"""5 s, with a margin for a busy machine; a deadline for each name would be more than an hour."""


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def stale(tmp_path: Path, seaweedfs: SeaweedFS, proxy: FaultProxy) -> Iterator[Site]:
    bucket = seaweedfs.make_bucket(f"stale-{uuid.uuid4().hex[:8]}")
    seaweedfs.put_many(bucket, {f"d/{name}": name.encode() for name in NAMES})
    site = Site(tmp_path, f"s3://{bucket}")
    site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    site.expected_trouble = TROUBLE
    site.mount(*SHORT_TTLS)
    yield site
    proxy.clear()
    site.tear_down()


def long_list(site: Site) -> tuple[list[str], float]:
    """`ls -l` of all files: its lines, and how many seconds it took."""
    began = time.monotonic()
    done = subprocess.run(
        ["ls", "-l", site.mountpoint / "d"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=True,
    )
    return done.stdout.splitlines(), time.monotonic() - began


@pytest.mark.parametrize("fault", [Fault.SILENCE, Fault.REFUSE, Fault.BUSY])
def test_a_thousand_expired_names_are_shown_while_the_origin_is_down(
    stale: Site, proxy: FaultProxy, seaweedfs: SeaweedFS, fault: Fault
) -> None:
    before, _ = long_list(stale)
    assert len(before) == 1 + len(NAMES)
    assert stale.status()["stale"] is False
    proxy.fault(fault)
    time.sleep(2)
    began = time.time()
    for turn in range(3):
        shown, seconds = long_list(stale)
        print(f"{fault}: ls -l of 1,000 expired names, time {turn}: {seconds:.2f} s")
        assert shown == before
        assert seconds < ONE_DEADLINE_S
        time.sleep(1.2)
    with pytest.raises(FileNotFoundError):
        os.stat(stale.mountpoint / "d" / "absent")
    status = stale.status()
    assert status["stale"] is True
    assert began <= status["stale_since"] <= time.time()
    proxy.clear()
    bucket = stale.source.removeprefix("s3://")
    seaweedfs.put_many(bucket, {"d/new": b"x"})
    eventually(lambda: len(long_list(stale)[0]) == 2 + len(NAMES))
    eventually(lambda: stale.status()["stale"] is False)
    assert stale.status()["stale_since"] is None
