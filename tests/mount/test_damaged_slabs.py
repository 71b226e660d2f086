"""What a disk gives back is compared before anybody gets it, on both data paths: also blocks that
this daemon has written, for slabs are never synced."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.format.paths import TierPaths
from cachefs.format.slab import SLOT_ENTRY, decode_header, entry_at, slab_layout
from cachefs.fuse import relay
from tests.mount.harness import MIB, Site, drop_pages, eventually

NAMES = {"tiny": 700, "small": 90_000, "large": 3 * MIB + 4_097}
BLOCKS = 6
PATHS = [
    "python",
    pytest.param(
        "relay",
        marks=pytest.mark.skipif(relay.why_not() is not None, reason=str(relay.why_not())),
    ),
]
Damage = Callable[[bytearray], None]


def flip_a_byte_in_four_kilobytes(data: bytearray) -> None:
    for at in range(min(137, len(data) - 1), len(data), 4096):
        data[at] ^= 0x40


def lose(data: bytearray) -> None:
    """A backing store that was full: what was written has never arrived."""
    data[:] = bytes(len(data))


def damage_blocks(site: Site, damage: Damage) -> int:
    """In all slots that hold a block, or did, whose number is returned. The next read asks the
    disk."""
    count = 0
    for path in TierPaths(site.cache).slabs.iterdir():
        with path.open("r+b", buffering=0) as file:
            header = decode_header(os.pread(file.fileno(), 4096, 0))
            assert header is not None
            layout = slab_layout(header.class_index, header.slab_bytes)
            table = os.pread(file.fileno(), layout.slot_count * SLOT_ENTRY.size, 4096)
            for slot in range(layout.slot_count):
                entry = entry_at(table.ljust(layout.data_offset, b"\0"), slot, header.mask)
                if entry is None:
                    continue
                place = layout.slot_offset(slot)
                data = bytearray(os.pread(file.fileno(), entry.length, place))
                damage(data)
                os.pwrite(file.fileno(), data, place)
                count += 1
            os.fsync(file.fileno())
        drop_pages(path)
    return count


def content(name: str) -> bytes:
    return random.Random(name).randbytes(NAMES[name])


def read_whole(path: Path) -> None:
    drop_pages(path)
    assert path.read_bytes() == content(path.name)


def read_little(path: Path) -> None:
    """4 KiB in each MiB, and the last bytes."""
    drop_pages(path)
    expected = content(path.name)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for at in [*range(0, len(expected), MIB - 65_536), len(expected) - 600]:
            assert os.pread(file.fileno(), 4096, at) == expected[at : at + 4096], at


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    for name in NAMES:
        (site.files / name).write_bytes(content(name))
    try:
        yield site
    finally:
        site.tear_down()


def have_it_stored(site: Site, data_path: str) -> None:
    """And told to the relay."""

    def is_ready() -> bool:
        before = site.status()
        for name in NAMES:
            read_whole(site.mountpoint / name)
        after = site.status()
        is_stored = int(after["cache"]["blocks"]) == BLOCKS
        if data_path == "python":
            return is_stored
        return is_stored and bool(after["relay"]["missed"] == before["relay"]["missed"])

    eventually(is_ready)


@pytest.mark.parametrize("data_path", PATHS)
@pytest.mark.parametrize("verify", ["first", "full"])
def test_damage_under_a_live_mount_is_fetched_again(
    site: Site, data_path: str, verify: str
) -> None:
    site.expected_trouble = ("a block is not what was stored",)
    site.mount("--data-path", data_path, "--verify", verify, "--scrub-interval", "0")
    bad = 0
    for damage, read in ((flip_a_byte_in_four_kilobytes, read_little), (lose, read_whole)):
        have_it_stored(site, data_path)
        fetched = site.fetched()
        assert damage_blocks(site, damage) >= BLOCKS
        for name in NAMES:
            read(site.mountpoint / name)
        status = site.status()
        bad += BLOCKS
        assert sum(tier["bad_blocks"] for tier in status["tiers"]) == bad
        assert 1 <= site.fetched() - fetched <= BLOCKS
    have_it_stored(site, data_path)
    # Nobody is told that memory which looks right was read from the disk a moment ago.
    damage_blocks(site, flip_a_byte_in_four_kilobytes)
    for path in TierPaths(site.cache).slabs.iterdir():
        path.read_bytes()
    for name in NAMES:
        read_little(site.mountpoint / name)
        read_whole(site.mountpoint / name)
