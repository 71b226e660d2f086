"""Writes through a mount while the store fails: one request, or all of them for a while."""

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import CLI, MIB, eventually
from tests.mount.stores import S3Store, Store, local_store, s3_store
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

FAULTS = (Fault.BUSY, Fault.ERROR, Fault.REFUSE, Fault.LOSE, Fault.SILENCE)
INSIDE = (*FAULTS, Fault.INSIDE)
LITTLE_ROOM = """
from cachefs.fuse.relay import _relay  # before libfuse
from cachefs.writes import files
files._ROOM_S = 1.0
"""

TROUBLE = (" cachefs.origin.", " cachefs.writes.", "stays in the spool", "stay in the spool")


@pytest.fixture(scope="module")
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as running:
        yield running


@pytest.fixture
def store(seaweedfs: SeaweedFS, proxy: FaultProxy, tmp_path: Path) -> Iterator[S3Store]:
    with s3_store(tmp_path, seaweedfs, "write-outages", proxy.endpoint) as found:
        found.site.expected_trouble += TROUBLE
        yield found
        proxy.clear()


@pytest.mark.long
def test_one_request_fails_and_no_program_notices(store: S3Store, proxy: FaultProxy) -> None:
    """503, an error, a reset, a lost answer after success, silence, an error in a good answer: at
    a PUT, a part, its completion, a copy, and a deletion."""
    site = store.site
    site.mount("--rw", "--write-timeout", "16s")
    root = site.mountpoint
    (root / "warm up").write_bytes(b"")
    expected = {"warm up": b""}
    for fault in FAULTS:
        proxy.fault(fault, times=1, method="PUT", text="/put")
        expected["put"] = os.urandom(1000)
        (root / "put").write_bytes(expected["put"])
    for fault in INSIDE:
        is_part = fault is not Fault.INSIDE  # the answer to a part has no body
        large = os.urandom(17 * MIB)
        if is_part:
            proxy.fault(fault, times=1, method="PUT", text="partNumber=")
            (root / "large").write_bytes(large)
        proxy.fault(fault, times=1, method="POST", text="uploadId=")
        (root / "large").write_bytes(large[::-1])
        expected["large"] = large[::-1]
    before = proxy.counts().faults
    for fault in INSIDE:
        (root / "old").write_bytes(b"renamed %a" % fault)
        proxy.fault(fault, times=1, method="PUT", text="/new")
        (root / "old").rename(root / "new")
        expected["new"] = b"renamed %a" % fault
    for fault in FAULTS:
        (root / "removed").write_bytes(b"1")
        proxy.fault(fault, times=1, method="DELETE", text="/removed")
        (root / "removed").unlink()
    assert proxy.counts().faults == before + len(INSIDE) + len(FAULTS)
    proxy.clear()
    assert store.names() == sorted(expected)
    for name, content in expected.items():
        assert store.read(name) == (root / name).read_bytes() == content
    assert store.uploads() == []
    site.umount()


def test_a_close_waits_for_the_end_of_an_outage(store: S3Store, proxy: FaultProxy) -> None:
    site = store.site
    site.mount("--rw")
    path = site.mountpoint / "file"
    with path.open("wb", buffering=0) as stream:
        stream.write(b"kept")
        proxy.fault(Fault.REFUSE)
        closing = threading.Thread(target=lambda: os.fsync(stream.fileno()))
        closing.start()
        eventually(lambda: "does not answer" in site.log.read_text())
        assert closing.is_alive()
        proxy.clear()
        closing.join()
    assert store.read("file") == path.read_bytes() == b"kept"
    site.umount()


def flush(path: Path) -> int:
    """Return the exit code of `cachefs flush`."""
    return subprocess.run([*CLI, "flush", str(path)], capture_output=True, check=False).returncode


def test_a_close_that_fails_keeps_the_bytes(store: S3Store, proxy: FaultProxy) -> None:
    site = store.site
    site.mount("--rw", "--write-timeout", "1s")
    path = site.mountpoint / "file"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(descriptor, b"kept")
    proxy.fault(Fault.REFUSE)
    with pytest.raises(OSError) as raised:
        os.close(descriptor)
    assert raised.value.errno == errno.EIO
    assert path.read_bytes() == b"kept"
    proxy.clear()
    # For moments the outage is still believed, and a busy store needs longer than a second.
    eventually(lambda: store.read_if_there("file") == b"kept" or flush(path) == 0)
    assert store.read("file") == b"kept"
    site.umount()


@pytest.fixture(params=["file", "s3"])
def small_spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        with local_store(tmp_path) as found:
            yield found
    else:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        with s3_store(tmp_path, server, "small-spools") as found:
            yield found


def fill(descriptor: int, written: bytearray) -> int:
    """Write until that fails. Return the errno."""
    try:
        while len(written) < 64 * MIB:
            piece = os.urandom(MIB)
            written += piece[: os.write(descriptor, piece)]
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_full_spool_gives_enospc_and_keeps_what_was_acknowledged(
    small_spool: Store, tmp_path: Path
) -> None:
    site = small_spool.site
    site.expected_trouble += TROUBLE
    (tmp_path / "sitecustomize.py").write_text(LITTLE_ROOM)
    site.environment["PYTHONPATH"] = str(tmp_path)
    site.mount("--rw", "--spool-size", "8MiB")
    root = site.mountpoint
    (root / "before").write_bytes(b"acknowledged")
    written = bytearray()
    descriptor = os.open(root / "large", os.O_CREAT | os.O_WRONLY)
    assert fill(descriptor, written) == errno.ENOSPC
    assert len(written) >= 4 * MIB
    with pytest.raises(OSError) as raised:
        os.close(descriptor)
    assert raised.value.errno == errno.ENOSPC
    assert small_spool.read("before") == b"acknowledged"
    assert small_spool.read_if_there("large") is None  # nothing is stored without its end
    (root / "large").unlink()
    (root / "after").write_bytes(b"there is room again")
    assert small_spool.read("after") == b"there is room again"
    site.umount()
