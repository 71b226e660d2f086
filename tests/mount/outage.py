"""What readers see while the origin fails: the same for every origin and every way to fail.

The limits are those that are promised, with a margin for a busy machine. What was measured is
printed (`pytest -rP`). Readers are processes of their own: one that hangs must not hang the test.
"""

import contextlib
import errno
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mount.harness import MIB, Site, eventually

TTL_S = 1
SHORT_TTLS = [
    word
    for name in ("--attr-ttl", "--entry-ttl", "--list-ttl", "--negative-ttl")
    for word in (name, f"{TTL_S}s")
]
EIO_S = 50
"""Promised: 5 s."""
NOTICED_S = 0.7
"""By then an outage that has cost a reader his patience is known as one."""
AT_ONCE_S = 4
"""Less than a reader's patience."""
RECOVERY_S = 60
"""Promised: 2 s."""
LONG_PATIENCE = ("--read-timeout", "200s", "--request-timeout", "100s")
"""For mounts on which no read ends by itself before `KILLED_S`."""
KILLED_S = 60
"""Promised: 1 s."""
TURNS = 10
"""A busy machine may be late a few times, but not each time."""
PATIENCE_S = 180
"""After this a reader counts as hanging."""

TROUBLE = (" cachefs.origin", " cachefs.namespace", " pyfuse3: fuse_read(): fuse_reply_* failed")
"""What may be in the log: that the origin failed, and the answer to a killed reader."""

CACHED = {f"cached/{number:02}": size for number, size in enumerate([*[20_000] * 9, 3 * MIB + 5])}
COLD = [f"cold/{number:04}" for number in range(400)]
COLD_BYTES = 60_000

_READER = """
import os, sys, time, zlib
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what the kernel has proves nothing
print("open", flush=True)
sys.stdin.readline()
began = time.monotonic()
found, failure = b"", 0
try:
    while piece := os.read(fd, 1 << 20):
        found += piece
except OSError as error:
    failure = error.errno
print(failure, zlib.crc32(found), time.monotonic() - began)
"""


def content(name: str) -> bytes:
    """What stands in the file `name` of `CACHED` or `COLD`."""
    return random.Random(name).randbytes(CACHED.get(name, COLD_BYTES))


def objects(cold: Sequence[str] = COLD) -> dict[str, bytes]:
    """All files, by their names."""
    return {name: content(name) for name in (*CACHED, *cold)}


class Reader:
    """A process that has opened a file and reads all of it when told to."""

    def __init__(self, root: Path, name: str) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _READER, root / name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def opens(self) -> bool:
        """Wait until it has opened the file; whether it could."""
        assert self._process.stdout is not None
        return self._process.stdout.readline() == "open\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def result(self) -> tuple[int, float]:
        """The errno (0 if it read what stands in the file; fails if it read something else), and
        how long the reads took."""
        try:
            out, err = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        if not out.strip() or out == "open\n":
            number = next((n for n in errno.errorcode if f"[Errno {n}]" in err), 0)
            assert number, err
            return number, 0.0
        failure, checksum, seconds = out.splitlines()[-1].split()
        if failure == "0":
            assert int(checksum) == zlib.crc32(content(self._name)), "wrong bytes"
        return int(failure), float(seconds)

    def kill(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.communicate()


class Outage:
    """A mount with files that are cached, `CACHED`, and files that are only listed, `cold`; each of
    these is used once."""

    def __init__(self, site: Site, cold: Sequence[str] = COLD) -> None:
        self.site = site
        self._cold_names = sorted(os.path.basename(name) for name in cold)
        # Backwards: read-ahead over a directory must not fetch them before their time.
        self._cold = reversed(cold)

    @property
    def root(self) -> Path:
        return self.site.mountpoint

    def prepare(self) -> None:
        """List everything, and read what shall be cached."""
        assert self.ls("cold") == self._cold_names
        assert self.ls("cached") == sorted(os.path.basename(name) for name in CACHED)
        for name in CACHED:  # a busy store may take longer than a reader waits
            eventually(lambda name=name: not self.read(name)[0], PATIENCE_S)  # type: ignore[misc]
        self.site.wait_until_stored(sum(-(-size // MIB) for size in CACHED.values()))

    def next_cold(self) -> str:
        return next(self._cold)

    def open(self, name: str) -> Reader:
        """Returns when it is open."""
        reader = Reader(self.root, name)
        assert reader.opens()
        return reader

    def read(self, name: str) -> tuple[int, float]:
        """Open and read in one go: errno and seconds of both together."""
        reader = Reader(self.root, name)
        began = time.monotonic()
        reader.go()
        failure, _ = reader.result()
        return failure, time.monotonic() - began

    def ls(self, name: str) -> list[str]:
        done = subprocess.run(
            ["ls", self.root / name],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    def settle(self) -> None:
        """The origin works: wait until the mount has found that out."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read(self.next_cold())[0]:
            assert time.monotonic() < deadline, "the origin works and nobody notices"
        self.ls("cold")

    # -- what is promised ----------------------------------------------------------------------

    @contextlib.contextmanager
    def cold_reader(self, what: str) -> Iterator[Reader]:
        """A file that isn't cached is opened now; in the body the origin fails, and then the read
        fails in time."""
        reader = self.open(self.next_cold())
        try:
            yield reader
            failure, seconds = reader.result()
        finally:
            reader.kill()
        print(f"{what}: uncached read: {os.strerror(failure)} after {seconds:.2f} s")
        assert failure == errno.EIO
        assert seconds < EIO_S

    def check_cached(self, what: str) -> None:
        """All that was read and listed before is served, also when every TTL has passed."""
        for moment in ("at once", "after every TTL"):
            began = time.monotonic()
            names = self.ls("cached")
            listed = time.monotonic()
            assert names == sorted(os.path.basename(name) for name in CACHED)
            assert self.ls("cold") == self._cold_names
            slowest_s = 0.0
            for name in CACHED:
                failure, seconds = self.read(name)
                assert failure == 0, f"{name}, {moment}: {os.strerror(failure)}"
                slowest_s = max(slowest_s, seconds)
            print(
                f"{what}: {moment}: ls {listed - began:.2f} s, slowest cached read {slowest_s:.2f}"
            )
            if moment == "at once":
                time.sleep(TTL_S + 0.2)

    def check_fails_at_once(self, what: str) -> None:
        """After a run of failures nobody waits any more."""
        time.sleep(NOTICED_S)
        readers = [Reader(self.root, self.next_cold()) for _ in range(12)]
        for reader in readers:
            reader.go()
        failures = [reader.result()[0] for reader in readers]
        assert set(failures) == {errno.EIO}
        quickest_s = PATIENCE_S * 1.0
        for turn in range(20):  # one of them may be the probe, and a process may begin slowly
            failure, seconds = self.read(self.next_cold())
            assert failure == errno.EIO
            quickest_s = min(quickest_s, seconds)
            if turn >= 2 and quickest_s < AT_ONCE_S:
                break
        print(f"{what}: failed at once: {quickest_s:.2f} s")
        assert quickest_s < AT_ONCE_S

    def check_recovery(self, what: str) -> None:
        """The origin has just returned: so have the bytes."""
        began = time.monotonic()
        while True:
            failure, _ = self.read(self.next_cold())
            seconds = time.monotonic() - began
            if not failure:
                break
            assert failure == errno.EIO
            assert seconds < RECOVERY_S, f"{what}: still failing"
        print(f"{what}: first good read after {seconds:.2f} s")
        assert seconds < RECOVERY_S
