"""Reads files at random and compares every byte, in a separate process. Run as a script:

    python -S checking_reader.py ROOT COUNT SEED DROP

ROOT has files `0` to COUNT - 1, made by `content`. The script prints "ready", reads until its
standard input ends, and then prints its results as JSON. With DROP 1 it drops the kernel's pages of
a file before each read, so that every read becomes a request.

It imports few modules, so that many readers start quickly.
"""

import errno
import json
import os
import random
import struct
import sys
import threading
import time

_HEADER = struct.Struct("<IIQ")
"""The file's number, version and size in bytes."""


def content(number: int, version: int, size_bytes: int) -> bytes:
    """Return the content of a file, which states its own number, version and size. `size_bytes`
    must be >= 16."""
    header = _HEADER.pack(number, version, size_bytes)
    return header + random.Random(number << 32 | version).randbytes(size_bytes - _HEADER.size)


def is_right(number: int, data: bytes) -> bool:
    """Return whether `data` is exactly one complete version of file `number`."""
    if len(data) < _HEADER.size:
        return False
    his_number, version, size_bytes = _HEADER.unpack_from(data)
    return (
        his_number == number
        and size_bytes == len(data)
        and data == content(number, version, size_bytes)
    )


def main() -> None:
    root, count, seed, drop = sys.argv[1], *map(int, sys.argv[2:])
    chance = random.Random(seed)
    stopped = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=await_end, daemon=True).start()
    times: list[tuple[float, float]] = []
    wrong: list[int] = []
    errors: dict[str, int] = {}
    print("ready", flush=True)
    while not stopped.is_set():
        # More than half of the reads go to a tenth of the files.
        number = chance.randrange(count if chance.random() < 0.4 else max(1, count // 10))
        began = time.monotonic()
        try:
            data = _read(f"{root}/{number}", drop)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            errors[name] = errors.get(name, 0) + 1
            continue
        finally:
            times.append((began, time.monotonic() - began))
        if not is_right(number, data):
            wrong.append(number)
    print(json.dumps({"times": times, "wrong": wrong, "errors": errors}), flush=True)


def _read(path: str, drop: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        if drop:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pieces = []
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
