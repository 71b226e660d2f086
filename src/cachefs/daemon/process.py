"""Settings and memory of the daemon's process, and the conversion of its exception groups."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from cachefs.errors import CachefsError

_M_ARENA_MAX = -8
"""From malloc.h of glibc."""
_RETURN_INTERVAL_S = 60.0


def calm_garbage_collector() -> None:
    """Run the garbage collector 14 times less often, and never over what the start has made.

    Requests create hardly any reference cycles, and a full pass examines all live objects.
    Measured: cold small files are read 1.15 times as fast. With a first threshold of 50,000 the
    garbage of `bench.soak` grew by 5 MB between two passes.

    `daemon.supervised` disables the collector until now: with passes, the imports of a start take
    a tenth more CPU.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    gc.enable()


def bound_malloc_arenas() -> None:
    """Make all threads share two arenas of malloc.

    With an arena per thread, other threads can't use what a thread frees: 88 MB instead of 72 MB
    after six minutes of `bench.soak`, and growing. Call it before any thread starts. Does nothing
    if the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


async def return_freed_memory() -> None:
    """Return whole free pages of malloc to the kernel, once a minute. Does nothing if the C library
    has no `malloc_trim`.

    malloc itself returns only the end of its heaps. In `bench.soak` the memory in use was level,
    and 6 MB of free pages became 10 MB within ten minutes. A call takes .3 to .5 ms, in a thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await trio.sleep(_RETURN_INTERVAL_S)
        await trio.to_thread.run_sync(trim, 0)


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the first `CachefsError` of an exception group instead of the group.

    Nurseries raise groups. A group with any other exception is raised unchanged.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        expected, unexpected = group.split(CachefsError)
        if expected is None or unexpected is not None:
            raise
        error: BaseException = expected
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
