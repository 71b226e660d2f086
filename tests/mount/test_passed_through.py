"""Large files that are cached as a whole: the kernel reads them from the cache disk by itself,
through kills, upgrades, evictions and damage."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachefs.format.paths import TierPaths
from cachefs.fuse import relay
from tests.memory_origin import content_of
from tests.mount.harness import MIB, Site, eventually, kill_daemon

SIZE = 9 * MIB + 4_321
SERVING = ("--workload", "serving", "--passthrough-from", "8MiB", "--data-path", "relay")


def _is_possible() -> bool:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return relay.why_not() is None and os.geteuid() == 0 and release >= (6, 9)


pytestmark = pytest.mark.skipif(not _is_possible(), reason="needs root and Linux 6.9")


def is_on_overlay(path: Path) -> bool:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True
    ).stdout
    return "overlay" in kind


@pytest.fixture
def serving(site: Site) -> Site:
    if is_on_overlay(site.cache.parent):
        pytest.skip("the kernel passes nothing through to a file system on others")
    site.options = SERVING
    for name in ("a", "b"):
        (site.files / name).write_bytes(content_of(name, 0, SIZE))
    (site.files / "small").write_bytes(content_of("small", 0, 100_000))
    return site


_libc = ctypes.CDLL(None, use_errno=True)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


@contextlib.contextmanager
def mapped_without_a_descriptor(path: Path) -> Iterator[Any]:
    """The bytes of a mapping whose file is closed: `mmap.mmap` would keep it open."""
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    try:
        yield (ctypes.c_char * size).from_address(address)
    finally:
        assert _libc.munmap(address, size) == 0


def load(site: Site, *names: str) -> None:
    """Until they can be passed through."""
    site.cli("load", *(site.mountpoint / name for name in names))
    for name in names:
        eventually(lambda name=name: is_passed_through(site, name))


def passed_through(site: Site) -> int:
    count: int = site.status()["passthrough"]["passed_through"]
    return count


def is_passed_through(site: Site, name: str) -> bool:
    """Whether an open of the file is, now."""
    before = passed_through(site)
    with (site.mountpoint / name).open("rb"):
        return passed_through(site) == before + 1


def slab_of(site: Site, name: str) -> Path:
    """The file in the cache that has exactly the bytes of this one."""
    wanted = (site.files / name).read_bytes()
    for path in TierPaths(site.cache).slabs.glob("*.slab"):
        if path.stat().st_size == len(wanted) and path.read_bytes() == wanted:
            return path
    raise AssertionError(f"no file of {name}")


def test_a_loaded_file_is_passed_through(serving: Site) -> None:
    serving.mount()
    path = serving.mountpoint / "a"
    load(serving, "a")
    before, served = passed_through(serving), serving.status()["reads"]["hit_bytes"]
    assert path.read_bytes() == content_of("a", 0, SIZE)
    assert serving.status()["reads"]["hit_bytes"] == served, "a READ came to the relay"
    assert passed_through(serving) == before + 1
    url = f"http://{serving.status()['metrics']}/metrics"
    metrics = httpx.get(url, trust_env=False, timeout=60).text
    assert f"cachefs_relay_opens_passed_through_total {before + 1}.0" in metrics
    assert "cachefs_relay_opens_total " in metrics
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 1 * MIB)
    assert os.preadv(fd, [page], MIB) == MIB
    assert page[:] == content_of("a", MIB, 2 * MIB)
    assert os.fstat(fd).st_size == SIZE
    os.close(fd)
    with mapped_without_a_descriptor(path) as mapped:
        assert mapped[:] == content_of("a", 0, SIZE)
    assert (serving.mountpoint / "small").read_bytes() == content_of("small", 0, 100_000)
    with pytest.raises(OSError, match="Read-only"):
        path.open("r+b")
    assert (
        "opens went to the cache disk directly" in serving.cli("status", serving.mountpoint).stdout
    )
    # A file that was read to its end is stored as one a little later.
    assert (serving.mountpoint / "b").read_bytes() == content_of("b", 0, SIZE)
    eventually(lambda: is_passed_through(serving, "b"))


def test_after_a_restart_it_is_when_it_was_read(serving: Site) -> None:
    serving.mount()
    load(serving, "a")
    serving.umount()
    serving.mount()
    assert not is_passed_through(serving, "a")
    gets = serving.fetched()
    assert (serving.mountpoint / "a").read_bytes() == content_of("a", 0, SIZE)
    eventually(lambda: is_passed_through(serving, "a"))
    assert serving.fetched() == gets


READER = """
import mmap, os, random, sys, time
root, seed, stop, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
size = os.stat(f"{root}/a").st_size
chance = random.Random(seed)
expected = {name: open(f"{sys.argv[5]}/{name}", "rb").read() for name in ("a", "b")}
count = 0
while not os.path.exists(stop):
    name = chance.choice("ab")
    fd = os.open(f"{root}/{name}", os.O_RDONLY)
    places = [chance.randrange(size - 70_000) for _ in range(20)]
    if how == "mmap":
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            os.close(fd)
            for place in places:
                assert mapped[place : place + 70_000] == expected[name][place : place + 70_000]
    else:
        for place in places:
            assert os.pread(fd, 70_000, place) == expected[name][place : place + 70_000]
        os.close(fd)
    count += 1
print(count)
"""


@contextlib.contextmanager
def readers(site: Site, tmp_path: Path) -> Iterator[None]:
    """Four that map files and four that read them, through opens of all kinds."""
    stop = tmp_path / "stop"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-S", "-E", "-c", READER, site.mountpoint, str(number), stop),
                *("mmap" if number % 2 else "pread", site.files),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    try:
        yield
    finally:
        stop.touch()
        ends = [process.communicate(timeout=120) for process in processes]
    for process, (out, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
        assert int(out) > 0


def test_kills_and_upgrades_under_readers(serving: Site, tmp_path: Path) -> None:
    serving.expected_trouble = ("was killed by SIGKILL; what is cached is served on",)
    serving.mount()
    load(serving, "a", "b")
    eventually(lambda: is_passed_through(serving, "a"))
    with readers(serving, tmp_path):
        for number in range(8):
            kill_daemon(serving)
            if number % 3 == 0:
                serving.cli("upgrade", serving.mountpoint)
    load(serving, "a")
    assert (serving.mountpoint / "a").read_bytes() == content_of("a", 0, SIZE)
    eventually(lambda: is_passed_through(serving, "a"))


def test_evicted_while_it_is_open(serving: Site) -> None:
    serving.mount()
    load(serving, "a")
    path = serving.mountpoint / "a"
    with mapped_without_a_descriptor(path) as mapped:
        with path.open("rb") as opened:
            serving.cli("evict", path)
            eventually(lambda: not list(TierPaths(serving.cache).slabs.glob("*.table")))
            # Another open beside the first one must not fail: it is of the same kind.
            assert path.read_bytes() == content_of("a", 0, SIZE)
            assert opened.read() == content_of("a", 0, SIZE)
        gets = serving.fetched()

        def is_fetched_again() -> bool:
            """Once the kernel has told that the file is closed."""
            assert path.read_bytes() == content_of("a", 0, SIZE)
            return serving.fetched() > gets

        eventually(is_fetched_again)
        assert mapped[:] == content_of("a", 0, SIZE)


def test_mapped_files_are_not_evicted(serving: Site) -> None:
    """Their space would not be free."""
    names = [f"n{number}" for number in range(9)]
    for name in names:
        (serving.files / name).write_bytes(content_of(name, 0, SIZE))
    serving.mount("--cache-size", "64MiB", "--cache-eviction", "lru")
    load(serving, "a")
    slab = slab_of(serving, "a")
    with mapped_without_a_descriptor(serving.mountpoint / "a") as mapped:
        for name in names:
            load(serving, name)
            assert (serving.mountpoint / name).read_bytes() == content_of(name, 0, SIZE)
            (tier,) = serving.status()["tiers"]
            assert tier["disk_bytes"] <= 64 * MIB
        assert slab.exists()
        assert is_passed_through(serving, "a")
        assert mapped[:] == content_of("a", 0, SIZE)


def test_damage_on_the_disk_is_found_by_the_scrubber(serving: Site) -> None:
    serving.expected_trouble = ("a block is not what was stored",)
    serving.mount("--scrub-interval", "1s")
    load(serving, "a")
    slab = slab_of(serving, "a")
    with slab.open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"?")
    eventually(lambda: serving.status()["tiers"][0]["bad_blocks"] > 0)
    eventually(lambda: not is_passed_through(serving, "a"))
    assert (serving.mountpoint / "a").read_bytes() == content_of("a", 0, SIZE)
    eventually(lambda: is_passed_through(serving, "a"))
    assert (serving.mountpoint / "a").read_bytes() == content_of("a", 0, SIZE)
    assert slab.read_bytes() == content_of("a", 0, SIZE)


def test_a_replaced_file(serving: Site) -> None:
    serving.mount("--attr-ttl", "100ms", "--entry-ttl", "100ms", "--list-ttl", "100ms")
    load(serving, "a")
    path = serving.mountpoint / "a"
    with path.open("rb") as opened:
        temporary = serving.files / "new"
        temporary.write_bytes(content_of("other", 0, SIZE + 5))
        temporary.replace(serving.files / "a")
        eventually(lambda: path.stat().st_size == SIZE + 5)
        assert path.read_bytes() == content_of("other", 0, SIZE + 5)
        assert opened.read() == content_of("a", 0, SIZE)
    load(serving, "a")
    eventually(lambda: is_passed_through(serving, "a"))
    assert path.read_bytes() == content_of("other", 0, SIZE + 5)


def test_a_reader_with_the_file_open_before(serving: Site) -> None:
    """All opens of a file are of one kind as long as there is one."""
    serving.mount()
    with (serving.mountpoint / "a").open("rb") as opened:
        assert opened.read(10) == content_of("a", 0, 10)
        serving.cli("load", serving.mountpoint / "a")
        time.sleep(0.5)
        assert not is_passed_through(serving, "a")
        assert (serving.mountpoint / "a").read_bytes() == content_of("a", 0, SIZE)
    eventually(lambda: is_passed_through(serving, "a"))


def test_limits_and_observers_switch_it_off(serving: Site, tmp_path: Path) -> None:
    serving.mount()
    load(serving, "a")
    assert is_passed_through(serving, "a")
    serving.cli("set", serving.mountpoint, f"access-log={tmp_path / 'log'}")
    assert not is_passed_through(serving, "a")
    assert "access log" in serving.cli("status", serving.mountpoint).stdout
    serving.cli("set", serving.mountpoint, "access-log=off")
    assert is_passed_through(serving, "a")
    serving.cli("set", serving.mountpoint, "limit-uid=12345=1MiB/s")
    assert not is_passed_through(serving, "a")
    assert (serving.mountpoint / "a").read_bytes() == content_of("a", 0, SIZE)


def test_many_processes_map_it_while_it_is_fetched(serving: Site) -> None:
    serving.mount()
    code = (
        "import hashlib, mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "print(hashlib.sha1(mmap.mmap(fd, 0, prot=mmap.PROT_READ)).hexdigest())\n"
    )
    command = [sys.executable, "-S", "-E", "-c", code, str(serving.mountpoint / "a")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(64)]
    serving.cli("load", serving.mountpoint / "a")
    found = {process.communicate(timeout=120)[0] for process in processes}
    assert len(found) == 1
    wanted = subprocess.run(
        [*command[:-1], str(serving.files / "a")], capture_output=True, text=True, check=True
    )
    assert found == {wanted.stdout}
    load(serving, "a")
