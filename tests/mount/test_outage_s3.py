"""A mount of a real S3 server, with a proxy between them that spoils answers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually
from tests.mount.outage import (
    AT_ONCE_S,
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
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

UNSEEN = [f"unseen/{number:02}" for number in range(30)]
"""Directories that nobody has looked into, with one file each."""
MORE_THAN_A_PAGE = [f"unseen/!/{number:04}" for number in range(1000)]
"""So that a LIST of those above doesn't show the others."""

OUTAGES = list(Fault)
AWAY = {Fault.REFUSE, Fault.SILENCE, Fault.ERROR}
"""Of no use to anybody. In the other modes the server is there, if only to say that it is busy, and
is asked again for every read."""

BUFFERED = "os.read(fd, 100)"
RANDOM = "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM); os.pread(fd, 100, 50_000)"
MAPPED = "import mmap; mmap.mmap(fd, 0, prot=mmap.PROT_READ)[20_000]"


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS) -> str:
    bucket = seaweedfs.make_bucket("outage")
    seaweedfs.put_many(bucket, objects())
    seaweedfs.put_many(bucket, {f"{name}/file": name.encode() for name in UNSEEN})
    seaweedfs.put_many(bucket, dict.fromkeys(MORE_THAN_A_PAGE, b""))
    return bucket


@pytest.fixture(scope="module")
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@contextmanager
def mounted_on(
    root: Path, seaweedfs: SeaweedFS, proxy: FaultProxy, bucket: str, *options: str
) -> Iterator[Outage]:
    site = Site(root, f"s3://{bucket}")
    site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    site.expected_trouble = TROUBLE
    site.mount(*SHORT_TTLS, *options)
    try:
        yield Outage(site)
    finally:
        proxy.clear()
        site.tear_down()


@pytest.fixture(scope="module")
def mounted(
    tmp_path_factory: pytest.TempPathFactory,
    seaweedfs: SeaweedFS,
    proxy: FaultProxy,
    bucket: str,
) -> Iterator[Outage]:
    root = tmp_path_factory.mktemp("outage")
    with mounted_on(root, seaweedfs, proxy, bucket) as outage:
        outage.prepare()
        assert outage.ls("unseen") == ["!", *(os.path.basename(name) for name in UNSEEN)]
        yield outage


@pytest.fixture(scope="module")
def patient(
    tmp_path_factory: pytest.TempPathFactory,
    seaweedfs: SeaweedFS,
    proxy: FaultProxy,
    bucket: str,
) -> Iterator[Outage]:
    """A mount whose readers wait for a long time."""
    root = tmp_path_factory.mktemp("patient")
    with mounted_on(root, seaweedfs, proxy, bucket, *LONG_PATIENCE) as outage:
        outage.settle()
        yield outage


@pytest.fixture
def outage(mounted: Outage, proxy: FaultProxy) -> Iterator[Outage]:
    """A mount whose origin works; so it does again afterwards."""
    mounted.settle()
    yield mounted
    proxy.clear()


@pytest.mark.parametrize("fault", OUTAGES)
def test_an_outage_costs_only_what_is_not_cached(
    outage: Outage, proxy: FaultProxy, fault: Fault
) -> None:
    with outage.cold_reader(fault) as reader:
        proxy.fault(fault)
        reader.go()
        outage.check_cached(fault)
    if fault in AWAY:
        outage.check_fails_at_once(fault)
    proxy.clear()
    outage.check_recovery(fault)


@pytest.mark.parametrize("fault", Fault)
def test_a_single_fault_is_invisible(outage: Outage, proxy: FaultProxy, fault: Fault) -> None:
    for _ in range(TURNS):
        before = proxy.counts().faults
        name = outage.next_cold()
        proxy.fault(fault, times=1, objects_only=True)
        failure, seconds = outage.read(name)
        print(f"{fault}, once: {os.strerror(failure)} after {seconds:.2f} s")
        assert seconds < EIO_S
        assert proxy.counts().faults == before + 1
        if failure == 0 or seconds < AT_ONCE_S:
            break
        # The store was so busy that the second request took the rest of the reader's patience.
        outage.settle()
    assert failure == 0
    if fault is Fault.FLIP:
        gets = proxy.counts().objects
        assert outage.read(name)[0] == 0, "what is cached is right too"
        assert proxy.counts().objects == gets


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.FLIP])
def test_a_single_fault_of_a_listing_is_invisible(
    outage: Outage, proxy: FaultProxy, fault: Fault
) -> None:
    before = proxy.counts().faults
    proxy.fault(fault, times=1)
    began = time.monotonic()
    # Backwards: a listing may also show the directories that follow.
    assert outage.ls(UNSEEN[-1 - OUTAGES.index(fault)]) == ["file"]
    print(f"{fault}, once: listed after {time.monotonic() - began:.2f} s")
    assert proxy.counts().faults == before + 1


@pytest.mark.parametrize("how", [BUFFERED, RANDOM, MAPPED], ids=["read", "random", "mmap"])
def test_a_reader_that_waits_for_a_silent_origin_can_be_killed(
    patient: Outage, proxy: FaultProxy, how: str
) -> None:
    script = f"import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); print(); {how}"
    path = patient.root / patient.next_cold()
    asked = proxy.counts().objects
    proxy.fault(Fault.SILENCE, objects_only=True)
    reader = subprocess.Popen(
        [sys.executable, "-S", "-E", "-u", "-c", script, path], stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: proxy.counts().objects > asked, PATIENCE_S)
    finally:
        began = time.monotonic()
        reader.kill()
        reader.wait(PATIENCE_S)
    seconds = time.monotonic() - began
    print(f"killed: gone after {seconds:.2f} s")
    proxy.clear()
    assert reader.returncode == -9, "its read had ended"
    assert seconds < KILLED_S
    patient.settle()
