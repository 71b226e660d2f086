"""One user who asks for more than the limit allows does not make others wait."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.mount.harness import MIB, Site, drop_pages

pytestmark = pytest.mark.root

HOG = 4242
HOG_BYTES = 2 << 30
THREADS = 8
PATIENCE_S = 180
"""A quiet machine needs some milliseconds."""

_HOG = """
import os, sys, threading
directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.setuid(int(sys.argv[2]))
fd = os.open("hog", os.O_RDONLY, dir_fd=directory)
size, threads = os.fstat(fd).st_size, int(sys.argv[3])
def ask(number):
    for start in range(number << 20, size, threads << 20):
        os.posix_fadvise(fd, start, 1 << 20, os.POSIX_FADV_WILLNEED)
asking = [threading.Thread(target=ask, args=[number]) for number in range(threads)]
for thread in asking:
    thread.start()
print("asking", flush=True)
for thread in asking:
    thread.join()
print("asked", flush=True)
sys.stdin.readline()
"""

_READER = """
import sys
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        sys.stdout.buffer.write(file.read())
"""


@pytest.fixture
def content(site: Site) -> dict[str, bytes]:
    content = {f"file{number}": os.urandom(200_000) for number in range(6)}
    for name, data in content.items():
        (site.files / name).write_bytes(data)
    with (site.files / "hog").open("wb") as file:
        file.truncate(HOG_BYTES)
    return content


@contextmanager
def hogging(site: Site) -> Iterator["subprocess.Popen[str]"]:
    args = [sys.executable, "-S", "-E", "-c", _HOG, site.mountpoint, str(HOG), str(THREADS)]
    hog = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "asking\n"
        yield hog
    finally:
        hog.kill()
        hog.communicate(timeout=PATIENCE_S)


def test_all_of_a_limited_user_s_readers_get_their_bytes(site: Site) -> None:
    """More of them than may have a READ in hand."""
    data = [os.urandom(MIB) for _ in range(4)]
    for number, piece in enumerate(data):
        (site.files / f"{number}").write_bytes(piece)
    site.mount("--limit-uid", "0=3MiB", "--readahead", "0")
    for _ in ("cold", "cached"):
        args = [sys.executable, "-S", "-E", "-c", _READER]
        readers = [
            subprocess.Popen([*args, site.mountpoint / f"{number}"], stdout=subprocess.PIPE)
            for number in range(len(data))
        ]
        found = [reader.communicate(timeout=PATIENCE_S)[0] for reader in readers]
        assert found == data
        for number in range(len(data)):
            drop_pages(site.mountpoint / f"{number}")


def read_all(site: Site, names: list[str]) -> bytes:
    args = [sys.executable, "-S", "-E", "-c", _READER, *(site.mountpoint / n for n in names)]
    return subprocess.run(args, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True).stdout


def test_others_read_on(site: Site, content: dict[str, bytes]) -> None:
    names = sorted(content)
    cached, cold = names[:3], names[3:]
    site.expected_trouble = ("fuse_read(): fuse_reply_* failed",)
    site.mount("--limit-uid", f"{HOG}=64KiB", "--dir-mode", "755", "--file-mode", "644")
    for name in cached:
        (site.mountpoint / name).read_bytes()
    with hogging(site) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "asked\n", "even the hog waits for nothing"
        for name in cached:
            drop_pages(site.mountpoint / name)
        for some in (cached, cold):
            began = time.monotonic()
            assert read_all(site, some) == b"".join(content[name] for name in some)
            print(f"{some}: {1000 * (time.monotonic() - began):.0f} ms")
