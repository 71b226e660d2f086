"""Objects are replaced behind the mount while readers have them open or mapped.

Every 4 KiB of an object say which object, which version and which page they are, and how long the
version is: a reader that got bytes of two versions, a hole or the wrong end would notice.
"""

import contextlib
import os
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site
from tests.servers.seaweedfs import SeaweedFS

STEPS = 200
STEP_S = 0.05
FILES = 8
PAGE = 4096
PAGES_MAX = 512
"""2 MiB: several blocks, and several READs."""
TTLS = ("--attr-ttl", "300ms", "--entry-ttl", "300ms", "--list-ttl", "300ms")
TTLS_MORE = ("--negative-ttl", "300ms", "--cache-size", "64MiB")

HEADER = struct.Struct("<4sIIII")
"""Magic, file, version, page, size in bytes."""

READER = """
import collections, errno, mmap, os, random, signal, struct, sys, time

root, seed, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stop, files = sys.argv[4], int(sys.argv[5])
chance = random.Random(seed)
header = struct.Struct("<4sIIII")
seen = collections.Counter()


def checked(number, page, data, expected):
    # The version that the page is of; `expected` is (version, size) as far as they are known.
    magic, file, version, index, size = header.unpack_from(data)
    found = (magic, file, index)
    assert found == (b"page", number, page), f"{found} instead of page {page} of file {number}"
    assert expected[0] in (None, version), f"version {version} in a file of {expected[0]}"
    assert size == expected[1], f"a page of {size} bytes in a file of {expected[1]}"
    length = min(4096, size - page * 4096)
    assert data == (data[:20] + bytes([version % 251]) * 4096)[:length], "a torn page"
    return version


def read_page(fd, number, page, expected):
    data = os.pread(fd, 4096, page * 4096)
    assert len(data) == min(4096, expected[1] - page * 4096), f"a short read: {len(data)}"
    return checked(number, page, data, expected)


def look(number):
    try:
        fd = os.open(f"{root}/{number:02}", os.O_RDONLY)
    except FileNotFoundError:
        return "absent"
    try:
        size = os.fstat(fd).st_size
        pages = list(range(-(-size // 4096)))
        version = None
        if how == "whole":
            data = b""
            while piece := os.read(fd, 1 << 20):
                data += piece
                time.sleep(chance.random() / 50)
            assert len(data) == size, f"{len(data)} bytes of {size}"
            for page in pages:
                piece = data[page * 4096 : page * 4096 + 4096]
                version = checked(number, page, piece, (version, size))
        elif how == "random":
            chance.shuffle(pages)
            for page in pages[:20]:
                version = read_page(fd, number, page, (version, size))
                time.sleep(chance.random() / 10)
        elif how == "held":
            version = read_page(fd, number, 0, (None, size))
            time.sleep(chance.uniform(0.2, 3))
            for page in pages:
                version = read_page(fd, number, page, (version, size))
        else:
            return mapped(fd, number, size, pages)
        assert os.fstat(fd).st_size == size, "its size has changed while it was open"
    except OSError as error:
        assert error.errno == errno.ESTALE, error
        return "stale"
    finally:
        os.close(fd)
    return "whole"


def mapped(fd, number, size, pages):
    # In a child: where a page can't be had any more, a mapping has only SIGBUS to say so.
    child = os.fork()
    if not child:
        try:
            view = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            version = None
            chance.shuffle(pages)
            for page in pages[:20]:
                data = view[page * 4096 : page * 4096 + 4096]
                version = checked(number, page, data, (version, size))
                time.sleep(chance.random() / 10)
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGBUS), "a mapping shows what it must not"
    return "stale" if code else "whole"


while not os.path.exists(stop):
    seen[look(chance.randrange(files))] += 1
    time.sleep(chance.random() / 2)  # the others shall find something that isn't cached
print(seen["whole"], seen["stale"], seen["absent"])
"""


def body(number: int, version: int, size: int) -> bytes:
    filler = bytes([version % 251]) * (PAGE - HEADER.size)
    pages = range(-(-size // PAGE))
    headers = (HEADER.pack(b"page", number, version, page, size) for page in pages)
    return b"".join(header + filler for header in headers)[:size]


class Store:
    """The objects, replaced at random; every size has room for whole headers."""

    def __init__(self, server: SeaweedFS, bucket: str) -> None:
        self._server = server
        self._bucket = bucket
        self._chance = random.Random(20_261_121)
        self._sizes: dict[int, int] = {}
        self._versions = 0
        self.done: Counter[str] = Counter()

    def put(self, number: int, size: int) -> None:
        self._versions += 1
        self._sizes[number] = size
        data = body(number, self._versions, size)
        self._server.put(self._bucket, f"{number:02}", data)

    def fill(self) -> None:
        for number in range(FILES):
            self.put(number, self._size(PAGES_MAX))

    def step(self) -> None:
        number = self._chance.randrange(FILES)
        size = self._sizes.get(number)
        change = self._chance.choice(["replace", "grow", "shrink", "delete"])
        if size is None:
            change = "create"
        self.done[change] += 1
        pages = 0 if size is None else size // PAGE
        if change == "delete":
            del self._sizes[number]
            self._server.delete(self._bucket, f"{number:02}")
        elif change == "replace":
            assert size is not None
            self.put(number, size)
        elif change == "grow":
            self.put(number, pages * PAGE + self._size(PAGES_MAX // 2))
        elif change == "shrink":
            self.put(number, pages // 2 * PAGE + self._size(max(1, pages // 2)))
        else:
            self.put(number, self._size(PAGES_MAX))

    def _size(self, pages_max: int) -> int:
        """Often not a whole number of pages."""
        odd = self._chance.choice([0, 0, -1, 7 - PAGE, HEADER.size + 3 - PAGE])
        return self._chance.randint(1, pages_max) * PAGE + max(odd, HEADER.size - PAGE)


@pytest.fixture
def replaced(tmp_path: Path, seaweedfs: SeaweedFS) -> Iterator[tuple[Site, Store]]:
    bucket = seaweedfs.make_bucket("replaced")
    store = Store(seaweedfs, bucket)
    store.fill()
    site = Site(tmp_path, f"s3://{bucket}")
    site.environment = seaweedfs.environment
    site.options = PATIENT
    yield site, store
    site.tear_down()


def test_an_open_file_is_one_version_or_stale(replaced: tuple[Site, Store], tmp_path: Path) -> None:
    site, store = replaced
    site.mount(*TTLS, *TTLS_MORE)
    stop = tmp_path / "stop"
    readers = [
        subprocess.Popen(
            [
                *(sys.executable, "-S", "-E", "-c", READER),
                *(site.mountpoint, str(seed), how, str(stop), str(FILES)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, how in enumerate(["whole", "random", "held", "mapped"] * 2)
    ]
    for _ in range(STEPS):
        began = time.monotonic()
        store.step()
        time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
        if any(reader.poll() is not None for reader in readers):
            break  # it says why below
    stop.touch()
    results = [reader.communicate(timeout=300) for reader in readers]
    for (out, err), reader in zip(results, readers, strict=True):
        print(f"{reader.args[7]}: whole, stale, absent: {out.strip()}")
        assert reader.returncode == 0, err
    assert sum(store.done.values()) == STEPS
    print(dict(store.done))
    told = [list(map(int, out.split())) for out, _ in results]
    assert sum(whole for whole, _, _ in told) > 10
    assert sum(stale for _, stale, _ in told) > 0, "nobody was ever too late: it proves little"
    # Once all is quiet, the last versions are seen.
    time.sleep(0.7)
    names = sorted(os.listdir(site.mountpoint))
    assert names == [f"{number:02}" for number in sorted(store._sizes)]
    for name in names:
        assert (site.mountpoint / name).stat().st_size == store._sizes[int(name)]


@pytest.mark.root
def test_overlayfs_is_stale_until_it_is_remounted(site: Site, tmp_path: Path) -> None:
    """Overlayfs keeps what it has found in its lower directory, and can't look it up again."""
    (site.files / "file").write_text("old")
    site.mount("--entry-ttl", "0", "--attr-ttl", "0", "--list-ttl", "0")
    upper, overlay = tmp_path / "upper", tmp_path / "overlay"
    for place in (upper, overlay):
        place.mkdir()
    with contextlib.ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", upper], check=True)
        stack.callback(subprocess.run, ["umount", upper], check=True)
        for name in ("u", "w"):
            (upper / name).mkdir()
        layers = f"lowerdir={site.mountpoint},upperdir={upper}/u,workdir={upper}/w"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", overlay], check=True)
        stack.callback(subprocess.run, ["umount", overlay], check=True)
        assert (overlay / "file").read_text() == "old"
        new = site.files / "new"
        new.write_text("newer")
        new.rename(site.files / "file")
        with pytest.raises(OSError, match="Stale file handle"):
            (overlay / "file").read_text()
        assert (site.mountpoint / "file").read_text() == "newer"
        subprocess.run(["mount", "-o", "remount", overlay], check=True)
        assert (overlay / "file").read_text() == "newer"
