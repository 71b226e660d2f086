"""How much of LMDB's file stands in this process's memory.

LMDB reads through a mapping, and every page that was ever looked at counts as the process's
(RssFile) until the kernel wants it back, although it is nothing but page cache: a walk over a
million names would look like 200 MB that the daemon has eaten. Here pages are given back. They stay
in the page cache, and are mapped again, many at a time, by the next look-up.
"""

import contextlib
import ctypes
import os
from pathlib import Path

_MADV_DONTNEED = 4
_PROC = Path("/proc/self")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
        wanted = os.path.realpath(file)
        for line in (_PROC / "maps").read_text(errors="surrogateescape").splitlines():
            addresses, access, *_ = line.split()
            if access.startswith("r-") and access.endswith("s") and line.endswith(" " + wanted):
                start, end = (int(text, 16) for text in addresses.split("-"))
                _libc.madvise(start, end - start, _MADV_DONTNEED)
