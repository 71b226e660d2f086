"""How much of LMDB's file stands in this process's memory.

LMDB reads through a mapping, and every page that was ever looked at counts as the process's
(RssFile) until the kernel wants it back, although it is nothing but page cache: a walk over a
million names would look like 200 MB that the daemon has eaten. Here pages are given back. They stay
in the page cache, and are mapped again, many at a time, by the next look-up.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4
_PAGE_BYTES = mmap.PAGESIZE
_PROC = Path("/proc/self")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def mapped_bytes() -> int:
    """Of all files that are mapped into this process, libraries included, what stands in memory."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    return 0


def unmap_pages(file: Path) -> None:
    """Give the pages of a shared, read-only mapping of `file` back. Nothing is lost: they can be
    had again from the page cache. Blocks for some 10 ms per 100 MB."""
    with contextlib.suppress(OSError):
        for start, end in _mappings(file):
            _libc.madvise(start, end - start, _MADV_DONTNEED)


def cold_share(file: Path) -> float:
    """How much of `file`, which is mapped, is not in the page cache, from 0 to 1. Blocks for some
    10 ms per 10 GB."""
    pages = cold = 0
    with contextlib.suppress(OSError):
        size_bytes = file.stat().st_size
        for start, end in _mappings(file):
            count = -(-min(end - start, size_bytes) // _PAGE_BYTES)
            seen = ctypes.create_string_buffer(count)
            if count and _libc.mincore(start, count * _PAGE_BYTES, seen) == 0:
                pages += count
                cold += seen.raw.count(0)
    return cold / pages if pages else 0.0


def _mappings(file: Path) -> Iterator[tuple[int, int]]:
    """First address and end of what is shared and read-only. Raises `OSError`."""
    wanted = os.path.realpath(file)
    for line in (_PROC / "maps").read_text(errors="surrogateescape").splitlines():
        addresses, access, *_ = line.split()
        if access.startswith("r-") and access.endswith("s") and line.endswith(" " + wanted):
            start, end = (int(text, 16) for text in addresses.split("-"))
            yield start, end
