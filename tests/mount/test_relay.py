"""READs that the relay answers without the daemon (`--data-path relay`)."""

import concurrent.futures
import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.fuse import relay
from tests.mount.harness import MIB, Site, drop_pages, eventually, standing_still

if relay.why_not() is not None:
    pytest.skip(str(relay.why_not()), allow_module_level=True)

FILES = 60
FEW = 10
"""Requests that asking for the status may cause."""
LARGE_BYTES = 5 * MIB + 12_345


def content(name: str, size_bytes: int) -> bytes:
    return random.Random(name).randbytes(size_bytes)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    for number in range(FILES):
        (site.files / f"{number}").write_bytes(content(f"{number}", 1 + number * 3_001))
    (site.files / "large").write_bytes(content("large", LARGE_BYTES))
    try:
        yield site
    finally:
        site.tear_down()


@pytest.fixture
def mounted(site: Site) -> Site:
    site.let_daemons_stand_still()
    site.mount("--data-path", "relay", "--prefetch", "off")
    return site


def counters(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = site.status()["relay"]
    return found


def read_all(site: Site) -> None:
    """Every byte as it must be, and none from the kernel's cache."""
    for number in range(FILES):
        path = site.mountpoint / f"{number}"
        drop_pages(path)
        assert path.read_bytes() == (site.files / f"{number}").read_bytes()


def have_it_served(site: Site) -> None:
    """Read until all small files come from the relay: what was fetched has been stored then, and
    names that were looked up while a listing ran are believed."""

    def all_are_hits() -> bool:
        before = counters(site)
        read_all(site)
        return bool(counters(site)["forwarded"] < before["forwarded"] + FEW)

    eventually(all_are_hits)


def test_a_block_is_served_by_the_relay_once_it_is_stored(mounted: Site) -> None:
    have_it_served(mounted)
    before, reads = counters(mounted), mounted.status()["reads"]["hits"]
    read_all(mounted)
    after = counters(mounted)
    hits = after["hits"] - before["hits"]
    assert hits >= FILES
    assert after["missed"] == before["missed"]
    assert after["forwarded"] < before["forwarded"] + FEW
    status = mounted.status()
    assert status["reads"]["hits"] == reads + hits  # everybody counts them
    assert sum(tier["hits"] for tier in status["tiers"]) <= status["reads"]["hits"]


def test_ranges_over_the_borders_of_blocks(mounted: Site) -> None:
    path, whole = mounted.mountpoint / "large", content("large", LARGE_BYTES)
    assert path.read_bytes() == whole
    eventually(lambda: mounted.status()["cache"]["blocks"] == 6)
    drop_pages(path)
    assert path.read_bytes() == whole  # has the daemon tell of all blocks
    before = counters(mounted)
    chance = random.Random(4)
    with path.open("rb", buffering=0) as file:
        for _ in range(300):
            drop_pages(path)
            border = chance.randrange(7) * MIB
            offset = max(0, border + chance.randint(-300_000, 300_000))
            length = chance.choice([1, 4096, 100_000, MIB])
            assert os.pread(file.fileno(), length, offset) == whole[offset : offset + length]
    assert counters(mounted)["hits"] > before["hits"]


def test_evicting_at_full_speed_gives_nobody_the_wrong_bytes(site: Site) -> None:
    """A cache that holds two fifths of what is read, by four readers, at random."""
    names = [f"e{number:03}" for number in range(300)]
    sums = {}
    for number, name in enumerate(names):
        data = content(name, 20_000 + number * 3_400)
        (site.files / name).write_bytes(data)
        sums[name] = hashlib.sha256(data).digest()
    site.mount("--data-path", "relay", "--cache-size", "64MiB", "--cache-eviction", "lru")
    stop = threading.Event()

    def read_at_random(seed: int) -> int:
        chance, count = random.Random(seed), 0
        while not stop.is_set():
            name = chance.choice(names[: 40 if chance.random() < 0.7 else len(names)])
            path = site.mountpoint / name
            drop_pages(path)
            assert hashlib.sha256(path.read_bytes()).digest() == sums[name], name
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_at_random, seed) for seed in range(4)]
        eventually(lambda: sum(tier["evicted"] for tier in site.status()["tiers"]) > 100)
        time.sleep(4)
        stop.set()
        counts = [reader.result() for reader in readers]
    (tier,) = site.status()["tiers"]
    print(counts, counters(site), tier["evicted"])
    assert tier["evicted"] > 100
    assert counters(site)["hits"] > 0


def test_the_policy_sees_what_the_relay_serves(site: Site) -> None:
    """What is read again and again stays, although the daemon is never asked for it."""
    noise = content("noise", 400_000)
    for number in range(300):
        (site.files / f"scan{number}").write_bytes(noise[number : number + 300_000])
    for number in range(20):
        (site.files / f"hot{number}").write_bytes(noise[number : number + 300_000])
    options = ("--cache-size", "64MiB", "--cache-eviction", "lru", "--prefetch", "off")
    site.mount("--data-path", "relay", *options)
    hot = [site.mountpoint / f"hot{number}" for number in range(20)]

    def read_hot() -> None:
        for path in hot:
            drop_pages(path)
            path.read_bytes()

    for _ in range(3):
        read_hot()
        time.sleep(0.3)
    gets = site.origin()["gets"]
    for number in range(300):
        (site.mountpoint / f"scan{number}").read_bytes()
        if number % 20 == 0:
            read_hot()
            time.sleep(0.25)  # the relay's hits are noted five times a second
    assert site.origin()["gets"] - gets <= 300 + 10


def test_reads_go_on_while_the_interpreter_is_stuck(mounted: Site) -> None:
    """The daemon is stopped: neither its loop nor its threads run."""
    have_it_served(mounted)
    pid = mounted.status()["pid"]

    def all_are_read() -> bool:
        with standing_still(pid), concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_all, mounted)
            is_done = not concurrent.futures.wait([reading], 20).not_done
            os.kill(pid, signal.SIGCONT)
            reading.result()
        return is_done

    # A READ for which the disk takes more than 250 ms is handed over to the daemon.
    assert any(all_are_read() for _ in range(3))


def restarts(site: Site) -> int | None:
    """None while no daemon answers."""
    try:
        return int(site.status()["data_path"]["restarts"])
    except AssertionError:
        return None


def test_a_dead_daemon_s_blocks_are_served(mounted: Site) -> None:
    have_it_served(mounted)
    os.kill(mounted.status()["pid"], signal.SIGKILL)
    mounted.expected_trouble = (" was killed by SIGKILL",)
    for _ in range(5):
        read_all(mounted)
    eventually(lambda: restarts(mounted) == 1)
    have_it_served(mounted)  # by what the new one has told


def test_who_watches_sees_all_reads(mounted: Site, tmp_path: Path) -> None:
    have_it_served(mounted)
    before = counters(mounted)
    log = tmp_path / "access.log"
    mounted.cli("set", mounted.mountpoint, f"access-log={log}")
    read_all(mounted)
    mounted.cli("set", mounted.mountpoint, "access-log=off")
    lines = [line for line in log.read_text().splitlines() if " read (" in line]
    assert len(lines) >= FILES
    assert counters(mounted)["hits"] == before["hits"]
    read_all(mounted)
    assert counters(mounted)["hits"] >= before["hits"] + FILES


def test_the_next_daemon_sees_all_reads_too(mounted: Site, tmp_path: Path) -> None:
    mounted.cli("set", mounted.mountpoint, f"access-log={tmp_path}/access.log")
    os.kill(mounted.status()["pid"], signal.SIGKILL)
    mounted.expected_trouble = (" was killed by SIGKILL",)
    read_all(mounted)
    eventually(lambda: restarts(mounted) == 1)
    before = counters(mounted)
    for _ in range(5):
        read_all(mounted)
    assert counters(mounted)["hits"] == before["hits"]


def test_a_limited_user_is_the_daemon_s_business(mounted: Site) -> None:
    have_it_served(mounted)
    before = counters(mounted)
    mounted.cli("set", mounted.mountpoint, "limit-uid=0=100MiB/s")
    read_all(mounted)
    assert counters(mounted)["hits"] == before["hits"]
    mounted.cli("set", mounted.mountpoint, "limit-uid=0=0")
    read_all(mounted)
    assert counters(mounted)["hits"] >= before["hits"] + FILES


def test_mapped_memory(mounted: Site) -> None:
    have_it_served(mounted)
    script = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file, "
        "mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:\n"
        "    sys.stdout.buffer.write(view[::-1])\n"
    )
    path = mounted.mountpoint / "59"
    drop_pages(path)
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, check=True)
    assert done.stdout == content("59", 1 + 59 * 3_001)[::-1]
    assert mmap.PAGESIZE == 4096


def test_tiers_come_and_go(mounted: Site, tmp_path: Path) -> None:
    """What a removed tier holds is served no more; what comes instead is."""
    second = tmp_path / "second"
    mounted.cli("tier", "add", mounted.mountpoint, second, "--size", "500MiB")
    have_it_served(mounted)
    in_second = mounted.status()["tiers"][1]["cached_blocks"]
    mounted.cli("tier", "remove", mounted.mountpoint, second)
    before = counters(mounted)
    read_all(mounted)
    assert 0 < in_second <= counters(mounted)["missed"] - before["missed"]
    have_it_served(mounted)


def test_a_write_is_one_message(site: Site) -> None:
    site.mount("--rw", "--data-path", "relay")
    before = counters(site)
    with (site.mountpoint / "file").open("wb", buffering=0) as file:
        for _ in range(400):
            file.write(b"a little")
    assert counters(site)["forwarded"] < before["forwarded"] + 600


def test_requests_whose_answer_is_always_the_same_reach_no_daemon(site: Site) -> None:
    """A new file costs a RELEASE at its close, and its first write a GETXATTR."""
    site.mount("--rw", "--data-path", "relay")
    (site.mountpoint / "first").write_bytes(b"a little")
    before = counters(site)
    file = os.open(site.mountpoint / "file", os.O_CREAT | os.O_WRONLY)
    for _ in range(500):
        with pytest.raises(OSError, match="not supported"):
            os.getxattr(file, "security.capability")
    os.close(file)
    assert os.getxattr(site.mountpoint / "first", "user.cachefs.version")
    assert counters(site)["forwarded"] < before["forwarded"] + 250
