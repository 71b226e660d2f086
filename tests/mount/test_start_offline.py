"""Mounting while the origin does not answer."""

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually
from tests.mount.outage import TROUBLE
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.hdfs import Hdfs
from tests.servers.seaweedfs import SeaweedFS

SHORT = ("--entry-ttl", "1s", "--list-ttl", "1s", "--negative-ttl", "1s", "--attr-ttl", "1s")
SAID = "what is known and cached of it is mounted all the same"


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def known(tmp_path: Path, seaweedfs: SeaweedFS, proxy: FaultProxy) -> Iterator[Site]:
    """Was mounted, and isn't any more. `cold` was seen and never read."""
    bucket = seaweedfs.make_bucket(f"offline-{uuid.uuid4().hex[:8]}")
    seaweedfs.put_many(bucket, {"d/read": b"data", "d/cold": b"data"})
    site = Site(tmp_path, f"s3://{bucket}")
    site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    site.expected_trouble = (*TROUBLE, SAID)
    site.mount(*SHORT)
    assert os.listdir(site.mountpoint) == ["d"]
    assert sorted(os.listdir(site.mountpoint / "d")) == ["cold", "read"]
    assert (site.mountpoint / "d/read").read_bytes() == b"data"
    site.umount()
    yield site
    proxy.clear()
    site.tear_down()


@pytest.mark.parametrize("fault", [Fault.SILENCE, Fault.REFUSE, Fault.BUSY])
def test_what_is_known_is_mounted_while_the_origin_is_away(
    known: Site, proxy: FaultProxy, seaweedfs: SeaweedFS, fault: Fault
) -> None:
    proxy.fault(fault)
    warned = known.mount(*SHORT)
    assert warned.startswith("cachefs: warning: ")
    assert SAID in warned
    assert known.log.read_text().count(SAID) == 1
    assert os.listdir(known.mountpoint) == ["d"]
    assert sorted(os.listdir(known.mountpoint / "d")) == ["cold", "read"]
    assert (known.mountpoint / "d/read").read_bytes() == b"data"
    with pytest.raises(OSError) as caught:
        (known.mountpoint / "d/cold").read_bytes()
    assert caught.value.errno == errno.EIO
    # On a fast machine all this took less than the TTLs, and nothing stale was shown so far.
    eventually(lambda: "cold" in os.listdir(known.mountpoint / "d") and known.status()["stale"])
    assert "stale answers were shown for" not in known.log.read_text(), "the outage has ended"
    seaweedfs.put_many(known.source.removeprefix("s3://"), {"d/new": b"x"})
    proxy.clear()
    eventually(lambda: "new" in os.listdir(known.mountpoint / "d"))
    eventually(lambda: is_read(known.mountpoint / "d/cold"))


def is_read(path: Path) -> bool:
    try:
        return path.read_bytes() == b"data"
    except OSError:
        return False


def test_without_stale_if_error_or_without_a_cache_it_is_refused(
    known: Site, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.fault(Fault.REFUSE)
    known.refused("--stale-if-error", "0")
    known.cache = tmp_path / "another cache"
    known.refused()
    assert not known.cache.exists()
    assert SAID not in known.log.read_text()


def test_an_answer_is_no_outage(known: Site) -> None:
    known.environment |= {"AWS_SECRET_ACCESS_KEY": "wrong"}
    assert "access denied" in known.refused()


@pytest.mark.timeout(600)  # Hadoop is downloaded the first time ever
def test_hdfs(tmp_path: Path, hdfs: Hdfs) -> None:
    """The mode of the root is known before anybody is let in."""
    root = f"/{tmp_path.name}"
    hdfs.put(f"{root}/f", b"data")
    hdfs.set_mode(root, "700")
    site = Site(tmp_path, f"{hdfs.url}{root}")
    site.environment = hdfs.environment
    site.expected_trouble = (*TROUBLE, SAID)
    try:
        site.mount(*SHORT)
        assert (site.mountpoint / "f").read_bytes() == b"data"
        site.umount()
        assert hdfs.namenode is not None
        hdfs.namenode.kill()
        hdfs.namenode.wait()
        site.mount(*SHORT)
        assert site.mountpoint.stat().st_mode & 0o777 == 0o700
        assert (site.mountpoint / "f").read_bytes() == b"data"
    finally:
        hdfs.start_namenode()
        hdfs.wait_until_ready()
        site.tear_down()
        hdfs.delete(root)
