"""A process that writes files until its stdin ends, and logs what the mount has acknowledged.

    python -S -E killed_writer.py DIRECTORY KIND NAME SEED LOG

Each line of LOG is a JSON list: `["try", key, value]` before the first byte is written,
`["done", key, value]` after close, fsync or rename has returned, and
`["error", key, errno, began_s, ended_s]` if one has failed, with the times before the file was
opened and after the error (CLOCK_MONOTONIC). A key is a name in DIRECTORY; its value is the version
of the content, the number of appended records, or None if there is no file. A key `NAME#BLOCK` is
one block of a file.

The script imports only the standard library. The tests import what contents look like.
"""

import contextlib
import errno
import json
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1 << 20
RECORD_BYTES = 2003
RECORDS = 40
"""The most records of a file that is appended to."""
BLOCK_BYTES = 4096
BLOCKS = 24


def content(name: str, version: int, size_bytes: int) -> bytes:
    """The content of a file that is written as a whole."""
    head = f"{name} {version} {size_bytes}\n".encode()
    return head + random.Random(head).randbytes(size_bytes - len(head))


def record(name: str, number: int) -> bytes:
    """A record of a file that is appended to."""
    return content(name, number, RECORD_BYTES)


def block(name: str, index: int, generation: int) -> bytes:
    """A block of a file whose blocks are overwritten."""
    return content(f"{name}#{index}", generation, BLOCK_BYTES)


def values_of(name: str, data: bytes) -> dict[str, int]:
    """The values of all keys in the content of a file. Raises `ValueError` for wrong bytes, and for
    a mix of two versions."""
    if name.startswith("append"):
        count, rest = divmod(len(data), RECORD_BYTES)
        if rest or data != b"".join(record(name, number) for number in range(count)):
            raise ValueError(f"{name}: not a sequence of whole records ({len(data)} bytes)")
        return {name: count}
    if name.startswith("blocks"):
        pieces = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
        if len(pieces) != BLOCKS:
            raise ValueError(f"{name}: {len(data)} bytes")
        return {
            f"{name}#{index}": _version_of(f"{name}#{index}", piece)
            for index, piece in enumerate(pieces)
        }
    # A renamed file has the content that was written under its first name.
    return {name: _version_of(name, data)}


def _version_of(name: str, data: bytes) -> int:
    head = data[:200].partition(b"\n")[0].decode(errors="replace").split()
    first_name = head[0] if head else ""
    if len(head) != 3 or (first_name != name and not first_name.startswith("tmp")):
        raise ValueError(f"{name}: it begins with {data[:50]!r} ({len(data)} bytes)")
    if data != content(first_name, int(head[1]), int(head[2])):
        raise ValueError(f"{name}: {len(data)} bytes are not the content {head}")
    return int(head[1])


class Writer:
    """Writes files of one kind, one after the other."""

    def __init__(self, directory: str, name: str, seed: str, log: str) -> None:
        self._directory = directory
        self._name = name
        self._chance = random.Random(seed)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._version = 0

    def note(self, *event: Any) -> None:
        os.write(self._log, json.dumps(event).encode() + b"\n")

    def path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    @contextlib.contextmanager
    def attempt(self, key: str) -> Iterator[None]:
        """Log the error, if there is one, and wait until the mount works again."""
        began_s = time.monotonic()
        try:
            yield
        except OSError as error:
            self.note("error", key, error.errno, began_s, time.monotonic())
            time.sleep(0.2)

    def whole(self, name: str, size_bytes: int) -> int:
        """Write a file as a whole and close it. Returns the version."""
        self._version += 1
        data = memoryview(content(name, self._version, size_bytes))
        self.note("try", name, self._version)
        fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for start in range(0, size_bytes, MIB):
                self.write(fd, data[start : start + MIB])
        finally:
            os.close(fd)
        self.note("done", name, self._version)
        return self._version

    def write(self, fd: int, data: Any) -> None:
        if os.write(fd, data) != len(data):
            raise OSError(errno.EIO, "a short write")

    def size(self) -> int:
        return self._chance.randrange(20_000, 180_000)

    # -- kinds -----------------------------------------------------------------------------------

    def rename(self) -> None:
        """Write a new file, close it, and rename it over one of three names."""
        new = f"final-{self._name}-{self._chance.randrange(3)}"
        old = f"tmp-{self._name}-{self._version}"
        with self.attempt(old):
            version = self.whole(old, self.size())
            self.note("try", new, version)
            self.note("try", old, None)
            os.rename(self.path(old), self.path(new))
            self.note("done", new, version)
            self.note("done", old, None)

    def append(self) -> None:
        """Append records, with an fsync after each few."""
        self._version += 1
        name = f"append-{self._name}-{self._version}"
        count = 0
        while count < RECORDS and not _has_ended():
            with self.attempt(name):
                fd = os.open(self.path(name), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                try:
                    count = values_of(name, _read_all(fd))[name]
                    for _ in range(self._chance.randrange(2, 8)):
                        for _ in range(self._chance.randrange(1, 4)):
                            self.note("try", name, count + 1)
                            self.write(fd, record(name, count))
                            count += 1
                        os.fsync(fd)
                        self.note("done", name, count)
                finally:
                    os.close(fd)

    def overwrite(self) -> None:
        """Replace one of three files, or a block of another."""
        if self._chance.random() < 0.3:
            name = f"whole-{self._name}-{self._chance.randrange(3)}"
            with self.attempt(name):
                self.whole(name, self.size())
            return
        name = f"blocks-{self._name}"
        with self.attempt(name):
            if not os.path.exists(self.path(name)):
                self._make_blocks(name)
            fd = os.open(self.path(name), os.O_RDWR)
            try:
                for _ in range(4):
                    self._version += 1
                    index = self._chance.randrange(BLOCKS)
                    self.note("try", f"{name}#{index}", self._version)
                    os.pwrite(fd, block(name, index, self._version), index * BLOCK_BYTES)
                    os.fsync(fd)
                    self.note("done", f"{name}#{index}", self._version)
            finally:
                os.close(fd)

    def _make_blocks(self, name: str) -> None:
        for index in range(BLOCKS):
            self.note("try", f"{name}#{index}", 0)
        fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            self.write(fd, b"".join(block(name, index, 0) for index in range(BLOCKS)))
        finally:
            os.close(fd)
        for index in range(BLOCKS):
            self.note("done", f"{name}#{index}", 0)

    def large(self) -> None:
        """Write one of two files that are sent in parts."""
        name = f"whole-{self._name}-{self._chance.randrange(2)}"
        with self.attempt(name):
            self.whole(name, self._chance.randrange(17 * MIB, 26 * MIB))
        time.sleep(0.2)


def _read_all(fd: int) -> bytes:
    """Read to the end: a read that meets an error half-way returns what was before it."""
    found = b""
    while piece := os.pread(fd, MIB, len(found)):
        found += piece
    return found


def _has_ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main() -> None:
    """Write until stdin ends."""
    directory, kind, name, seed, log = sys.argv[1:]
    writer = Writer(directory, name, seed, log)
    kinds: dict[str, Callable[[], None]] = {
        "rename": writer.rename,
        "append": writer.append,
        "overwrite": writer.overwrite,
        "large": writer.large,
    }
    while not _has_ended():
        kinds[kind]()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
