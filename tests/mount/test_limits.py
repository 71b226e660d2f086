"""Limits of single users through the mount, and changes while it is mounted."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MIB, Site, eventually

pytestmark = pytest.mark.root

LIMITED, FREE = 4242, 4243
FILE_BYTES = 160 * MIB
RATE = 4 * MIB
"""Far below what a busy machine reads."""
LEAST = 0.3
"""The part of its limit that a user reaches although the machine is busy."""

_READER = """
import os, sys, time
root, name, uid, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # others may not come here by the path
os.setuid(uid)
fd = os.open(name, os.O_RDONLY, dir_fd=directory)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
print("open", flush=True)
sys.stdin.readline()
began, total = time.monotonic(), 0
while time.monotonic() - began < seconds:
    piece = os.read(fd, 1 << 17)
    total += len(piece)
    if not piece:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, 0)
print(total / (time.monotonic() - began))
"""


class Reader:
    """A user's process; it reads one file over and over."""

    def __init__(self, site: Site, name: str, uid: int, seconds: float) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-E", "-c", _READER),
                *(site.mountpoint, name, str(uid), str(seconds)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "open\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def bytes_per_s(self) -> float:
        out, _ = self._process.communicate(timeout=300)
        assert self._process.returncode == 0
        return float(out)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    # A read-ahead that is still held back when the mount ends finds nobody to answer.
    site.expected_trouble = ("ERROR pyfuse3: fuse_read(): fuse_reply_* failed",)
    for name in ("a", "b"):
        (site.files / name).write_bytes(os.urandom(MIB) * (FILE_BYTES // MIB))
    yield site
    site.tear_down()


def speeds(site: Site, *uids: int, seconds: float = 3) -> list[float]:
    """Of one reader for each uid, each with a file of his own, all at once."""
    readers = [Reader(site, name, uid, seconds) for name, uid in zip("ab", uids, strict=False)]
    for reader in readers:
        reader.go()
    return [reader.bytes_per_s() for reader in readers]


def warm(site: Site) -> None:
    for name in ("a", "b"):
        assert len((site.mountpoint / name).read_bytes()) == FILE_BYTES


def test_a_limit_holds_one_user_and_nobody_else(site: Site) -> None:
    site.mount("--limit-uid", f"{LIMITED}=4MiB/s")
    warm(site)
    limited, free = speeds(site, LIMITED, FREE)
    print(f"limited {limited / MIB:.1f}, free {free / MIB:.1f} MiB/s")
    assert LEAST * RATE < limited < 1.25 * RATE
    assert free > 2 * RATE


def test_limits_are_changed_while_mounted(site: Site) -> None:
    site.mount()
    warm(site)
    said = site.cli("set", site.mountpoint, f"limit-uid={LIMITED}=4MiB/s", "max-downloads=7")
    assert "was unlimited and is 4 MiB/s until" in said.stdout
    assert "LIMIT          4 MiB/s for uid 4242" in site.cli("status", site.mountpoint).stdout
    (limited,) = speeds(site, LIMITED)
    assert LEAST * RATE < limited < 1.25 * RATE
    reader = Reader(site, "a", LIMITED, 3)
    site.cli("set", site.mountpoint, f"limit-uid={LIMITED}=0")
    reader.go()
    assert reader.bytes_per_s() > 2 * RATE, "files that are open are freed too"
    site.cli("set", site.mountpoint, "cache-size=1GiB", code=2)


def test_the_download_limit(site: Site) -> None:
    site.mount("--download-limit", "10MiB/s", "--readahead", "0")
    began = time.monotonic()
    with (site.mountpoint / "a").open("rb") as file:
        assert len(file.read(30 * MIB)) == 30 * MIB
    assert 2 < time.monotonic() - began < 50
    site.cli("set", site.mountpoint, "download-limit=0")
    warm(site)
    eventually(lambda: "LIMIT" not in site.cli("status", site.mountpoint).stdout)
