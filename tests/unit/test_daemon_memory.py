"""The garbage collector runs again after a start, and free memory goes back to the kernel."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from cachefs.daemon import process

PIECES, PIECE_BYTES = 1_000, 32 << 10  # smaller than what malloc maps separately

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def test_the_collector_runs_again_after_the_start() -> None:
    code = (
        "import gc; from cachefs.daemon.process import calm_garbage_collector; gc.disable(); "
        "calm_garbage_collector(); assert gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


async def test_free_pages_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in the middle of a heap."""
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE_BYTES)
    last = pieces.pop()  # malloc itself returns only what is free after it
    for piece in pieces:
        libc.free(piece)
    before_bytes = anonymous_bytes()
    monkeypatch.setattr(process, "_RETURN_INTERVAL_S", 0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.return_freed_memory)
        while anonymous_bytes() > before_bytes - PIECES * PIECE_BYTES // 2:  # noqa: ASYNC110
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    libc.free(last)
