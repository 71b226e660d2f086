"""A mount whose processes may have few files open, and far more slabs."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.format.json_sum import decode_json, encode_json
from cachefs.fuse import relay
from cachefs.supervisor.open_files import LEAST_OPEN_FILES
from tests.mount import harness
from tests.mount.harness import Site, children_of, drop_pages, eventually

FILES = 250
FILE_BYTES = 4_000
SLAB_BYTES = 12 << 10


def limit_files(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """What the site starts from now on may have so many open."""
    shell = ("sh", "-c", f'ulimit -n {most} && exec "$@"', "sh")
    monkeypatch.setattr(harness, "CLI", (*shell, *harness.CLI))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.tear_down()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(FILE_BYTES)


def open_files(site: Site) -> list[int]:
    """Of each process of the mount."""
    pids = {site.pid(), *children_of(site.pid())}
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


@pytest.mark.parametrize("data_path", ["relay", "python"])
def test_more_slabs_than_may_be_open(
    site: Site, data_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if data_path == "relay" and relay.why_not() is not None:
        pytest.skip(str(relay.why_not()))
    limit_files(monkeypatch, LEAST_OPEN_FILES)
    for number in range(FILES):
        (site.files / f"{number}").write_bytes(content(number))
    site.mount("--data-path", data_path)
    site.umount()
    # Slabs of one file each, or it would take gigabytes to have many.
    identity = decode_json((site.cache / "cachefs.json").read_bytes())
    identity["slab_bytes"] = SLAB_BYTES
    (site.cache / "cachefs.json").write_bytes(encode_json(identity, 2))
    site.mount("--data-path", data_path)
    order = list(range(FILES))
    random.Random(1).shuffle(order)

    def all_are_cached() -> bool:
        sent = site.origin()["gets"]
        for number in order:
            path = site.mountpoint / f"{number}"
            drop_pages(path)
            assert path.read_bytes() == content(number)
            if number % 100 == 0:
                assert max(open_files(site)) <= LEAST_OPEN_FILES
        return site.origin()["gets"] == sent

    eventually(all_are_cached)
    assert site.status()["tiers"][0]["cached_blocks"] == FILES
    assert len(os.listdir(site.cache / "slabs")) >= FILES
    if data_path == "relay":
        before = site.status()["relay"]["hits"]
        few = order[:10]
        eventually(lambda: read_natively(site, few, before))
    site.crash()
    site.cli("umount", "--stale", site.mountpoint)
    site.mount("--data-path", data_path)
    assert (site.mountpoint / "7").read_bytes() == content(7), "the next daemon can start"


def read_natively(site: Site, numbers: list[int], hits_before: int) -> bool:
    """Whether the relay has served files again and again that fit into what it may open."""
    for number in numbers:
        drop_pages(site.mountpoint / f"{number}")
        assert (site.mountpoint / f"{number}").read_bytes() == content(number)
    hits: int = site.status()["relay"]["hits"]
    return hits > hits_before + 3 * len(numbers)


@pytest.mark.parametrize("most", [20, LEAST_OPEN_FILES - 1])
def test_a_limit_that_is_too_low_is_refused(
    site: Site, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_files(monkeypatch, most)
    said = site.refused(code=2)
    assert f"only {most} files" in said
    assert "ulimit -n" in said
