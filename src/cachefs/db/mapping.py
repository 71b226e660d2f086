"""Measure and reduce how much of LMDB's file is in this process's memory.

LMDB reads through a mapping. Every page that was read counts as the process's memory (RssFile)
until the kernel reclaims it, although it is only page cache: after a walk over a million names the
daemon would seem to use 200 MB more. This module unmaps such pages. They stay in the page cache,
and the next look-up maps them again, many at a time.
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
    """Return the bytes of mapped files, libraries included, in this process's memory (RssFile); 0
    if that can't be read."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    return 0


def unmap_pages(file: Path) -> None:
    """Unmap the pages of all shared, read-only mappings of `file`. No data is lost: the pages stay
    in the page cache. Blocks for some 10 ms per 100 MB."""
    with contextlib.suppress(OSError):
        for start, end in _mappings(file):
            _libc.madvise(start, end - start, _MADV_DONTNEED)


def cold_share(file: Path) -> float:
    """Return the share of the mapped `file`, from 0 to 1, that is not in the page cache. Blocks
    for some 10 ms per 10 GB."""
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
    """Yield start and end address of each shared, read-only mapping of `file`. Raises `OSError`."""
    wanted = os.path.realpath(file)
    for line in (_PROC / "maps").read_text(errors="surrogateescape").splitlines():
        addresses, access, *_ = line.split()
        if access.startswith("r-") and access.endswith("s") and line.endswith(" " + wanted):
            start, end = (int(text, 16) for text in addresses.split("-"))
            yield start, end
