"""A writable mount whose origin takes nothing: when a close fails, and what the bytes become."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

LIMIT_S = 40
"""Promised: 4 s. A busy machine needs longer, and 60 s are the default."""


@pytest.fixture(scope="module")
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.SILENCE, Fault.ERROR])
def test_a_close_fails_after_the_write_timeout(
    fault: Fault, tmp_path: Path, seaweedfs: SeaweedFS, proxy: FaultProxy
) -> None:
    bucket = seaweedfs.make_bucket(f"write-timeout-{fault.value}")
    site = Site(tmp_path, f"s3://{bucket}/prefix")
    site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    site.expected_trouble = (" cachefs.origin", "an empty directory is shown", "in the spool")
    site.mount("--rw", "--write-timeout", "4s")
    file = site.mountpoint / "file"
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY)
    try:
        os.write(descriptor, b"kept")
        proxy.fault(fault)
        began_s = time.monotonic()
        with pytest.raises(OSError) as raised:
            os.close(descriptor)
        assert raised.value.errno == errno.EIO
        assert time.monotonic() - began_s < LIMIT_S
        assert file.read_bytes() == b"kept"
        with file.open("ab", buffering=0) as more:
            began_s = time.monotonic()
            more.write(b" and more")  # writes go on while the origin is away
            assert time.monotonic() - began_s < LIMIT_S
            proxy.clear()
    finally:
        proxy.clear()
        site.umount()

    def is_stored() -> bool:
        found = seaweedfs.client.list_objects_v2(Bucket=bucket, Prefix="prefix/file")
        return bool(found["KeyCount"])

    if not is_stored():  # a busy store may take longer; the next mount sends it
        site.mount("--rw")
        eventually(is_stored)
        site.umount()
    body = seaweedfs.client.get_object(Bucket=bucket, Key="prefix/file")["Body"]
    assert body.read() == b"kept and more"
