"""A file whose close failed is sent again later: never over what another machine has stored."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mount.harness import Site, changeable, eventually
from tests.mount.stores import Store, local_store, s3_store
from tests.mount.test_unsent import no_origin, unsent
from tests.mount.test_write_outages import flush
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

TROUBLE = ("cachefs.origin", "cachefs.namespace", "cachefs.writes", "in the spool", "the spool has")


class Place(NamedTuple):
    """A store, and how it is away for a while."""

    store: Store
    away: Callable[[], contextlib.AbstractContextManager[None]]

    def write_as_other(self, name: str, data: bytes) -> None:
        """Write as another machine does, also while the store is away for this one."""
        site = self.store.site
        if site.source.startswith("file://"):
            with changeable(site.files):
                (site.files / name).write_bytes(data)
        else:
            self.store.write(name, data)


@pytest.fixture(scope="module")
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as running:
        yield running


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "file":
        with local_store(tmp_path) as store:
            store.site.expected_trouble += TROUBLE
            yield Place(store, lambda: no_origin(store.site))
        return
    server: SeaweedFS = request.getfixturevalue("seaweedfs")
    proxy: FaultProxy = request.getfixturevalue("proxy")

    @contextlib.contextmanager
    def outage() -> Iterator[None]:
        proxy.fault(Fault.REFUSE)
        try:
            yield
        finally:
            proxy.clear()

    with s3_store(tmp_path, server, "repeated-sends", proxy.endpoint) as found:
        found.site.expected_trouble += TROUBLE
        yield Place(found, outage)
        proxy.clear()


def begin_to_write(directory: Path, *names: str) -> list[int]:
    """Open files, and replace their content as a whole. Returns the descriptors."""
    found = []
    for name in names:
        descriptor = os.open(directory / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.write(descriptor, b"ours")
        found.append(descriptor)
    return found


def fail_to_close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with pytest.raises(OSError) as raised:
            os.close(descriptor)
        assert raised.value.errno in (errno.EIO, errno.EACCES)


def states(site: Site) -> dict[str, str]:
    """The states of the unsent files, by name."""
    return {Path(row["path"]).name: row["state"] for row in unsent(site)}


def until_conflicts(site: Site, *names: str) -> None:
    """Until no file waits to be sent. These must have been refused, and no others."""
    found: dict[str, str] = {}

    def are_decided() -> bool:
        found.clear()
        found.update(states(site))
        return all(state == "conflict" for state in found.values())

    eventually(are_decided)
    assert found == dict.fromkeys(names, "conflict")


def test_a_repeated_send_replaces_nothing_newer(place: Place) -> None:
    store, site = place.store, place.store.site
    store.write("old", b"first")
    site.mount("--rw", "--write-timeout", "1s", "--publish-interval", "1s")
    descriptors = begin_to_write(site.mountpoint, "old", "new", "alone")
    with place.away():
        fail_to_close(*descriptors)
        for name in ("old", "new"):
            place.write_as_other(name, b"theirs")
    until_conflicts(site, "old", "new")
    assert store.read("old") == store.read("new") == b"theirs"
    assert store.read("alone") == b"ours"
    (row,) = unsent(site, site.mountpoint / "old")
    assert Path(
        site.cli("writes", "save", row["id"], "-m", site.mountpoint).stdout.strip()
    ).exists()
    site.cli("writes", "send", site.mountpoint / "old", "--overwrite")
    assert store.read("old") == b"ours"
    site.umount()


def test_nor_does_the_next_daemon(place: Place) -> None:
    store, site = place.store, place.store.site
    store.write("old", b"first")
    site.mount("--rw", "--write-timeout", "1s", "--publish-interval", "1s")
    descriptors = begin_to_write(site.mountpoint, "old", "new", "alone")
    with place.away():
        fail_to_close(*descriptors)
        site.crash()
        site.cli("umount", site.mountpoint)
        for name in ("old", "new"):
            place.write_as_other(name, b"theirs")
    site.mount("--rw", "--publish-interval", "1s")
    until_conflicts(site, "old", "new")
    assert store.read("old") == store.read("new") == b"theirs"
    assert store.read("alone") == b"ours"
    site.umount()


def test_a_flush_replaces_as_a_close_does(place: Place) -> None:
    store, site = place.store, place.store.site
    store.write("old", b"first")
    site.let_only_closes_send()
    site.mount("--rw", "--write-timeout", "1s", "--publish-interval", "1h")
    descriptors = begin_to_write(site.mountpoint, "old")
    with place.away():
        fail_to_close(*descriptors)
        place.write_as_other("old", b"theirs")
    eventually(lambda: flush(site.mountpoint) == 0)  # for moments the outage is believed
    assert store.read("old") == b"ours"
    assert unsent(site) == []
    site.umount()


@pytest.mark.long
def test_an_own_send_whose_answer_was_lost_is_no_conflict(
    seaweedfs: SeaweedFS, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Also if the file has changed since, or has other attributes."""
    with s3_store(tmp_path, seaweedfs, "lost-answers", proxy.endpoint) as store:
        site = store.site
        site.expected_trouble += TROUBLE
        names = ("old", "changed", "attributes")
        for name in names:
            store.write(name, b"first")
        site.mount("--rw", "--write-timeout", "1s", "--publish-interval", "1s")
        for name in names:
            path = site.mountpoint / name
            assert path.read_bytes() == b"first"
            descriptors = begin_to_write(site.mountpoint, name)
            proxy.fault(Fault.LOSE, method="PUT", text=f"/{name}")
            fail_to_close(*descriptors)
            assert store.read(name) == b"ours"
        proxy.fault(Fault.REFUSE)
        (site.mountpoint / "attributes").chmod(0o600)
        with pytest.raises(OSError, match="Input/output"):
            (site.mountpoint / "changed").write_bytes(b"changed")
        proxy.clear()
        eventually(lambda: not unsent(site))
        assert store.read("old") == store.read("attributes") == b"ours"
        assert int(store.metadata("attributes")["mode"]) & 0o777 == 0o600
        assert store.read("changed") == b"changed"
        site.umount()
