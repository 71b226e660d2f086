"""Reads a safetensors file like a loader, in a separate process. Run as a script:

    python -S weights_reader.py PATH read|keys|shuffled|threads|direct|pages SEED

`read` reads the file in order with read(2). `keys` and `shuffled` copy each tensor from a mapping
of the file, as a copy to a GPU does: in the order of the file, or in a random one. `threads` reads
the tensors with four threads and pread(2). `direct` reads in order with O_DIRECT. `pages` touches
random single pages of a mapping, as gets of LMDB do. It prints bytes and seconds.
"""

import json
import mmap
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_PIECE_BYTES = 1 << 20
_PAGES = 20_000


def main() -> None:
    path, way, seed = sys.argv[1:]
    began = time.monotonic()
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
    if way in ("read", "direct"):
        size_bytes = _read(fd)
    elif way == "pages":
        size_bytes = _touch(fd, random.Random(int(seed)))
    else:
        tensors = _tensors(fd)
        if way == "shuffled":
            random.Random(int(seed)).shuffle(tensors)
        size_bytes = _pread(fd, tensors) if way == "threads" else _copy(fd, tensors)
    print(size_bytes, time.monotonic() - began)


def _tensors(fd: int) -> list[tuple[int, int]]:
    """Return the range of each tensor in the file, in order."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    head = json.loads(os.pread(fd, length, 8))
    ranges = (tensor["data_offsets"] for tensor in head.values())
    return sorted((8 + length + first, 8 + length + end) for first, end in ranges)


def _read(fd: int) -> int:
    buffer = mmap.mmap(-1, _PIECE_BYTES)  # O_DIRECT needs whole pages
    size_bytes = 0
    while count := os.readv(fd, [buffer]):
        size_bytes += count
    return size_bytes


def _touch(fd: int, chance: random.Random) -> int:
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    pages = len(mapped) // mmap.PAGESIZE
    return sum(
        len(mapped[at : at + mmap.PAGESIZE])
        for at in (chance.randrange(pages) * mmap.PAGESIZE for _ in range(_PAGES))
    )


def _copy(fd: int, tensors: list[tuple[int, int]]) -> int:
    mapped = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    buffer = memoryview(bytearray(max(end - first for first, end in tensors)))
    for first, end in tensors:
        buffer[: end - first] = mapped[first:end]
    return sum(end - first for first, end in tensors)


def _pread(fd: int, tensors: list[tuple[int, int]]) -> int:
    def read(tensor: tuple[int, int]) -> int:
        first, end = tensor
        buffer = bytearray(_PIECE_BYTES)
        for at in range(first, end, _PIECE_BYTES):
            os.preadv(fd, [memoryview(buffer)[: end - at]], at)
        return end - first

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(read, tensors))


if __name__ == "__main__":
    main()
