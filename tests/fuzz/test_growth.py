"""Twice the input takes about twice the time, and memory in proportion: no answer, page or index
occupies the interpreter for long.

A target names such inputs in `GROWING`: functions that return about as many bytes as they are told.
"""

import gc
import importlib
import time
import tracemalloc
from collections.abc import Callable

import pytest

from tests.fuzz.engine import TARGETS

BYTES = 1 << 16
TRIES = 4
FLOOR_S = 0.03
"""Less than this tells nothing on a busy machine."""
MOST_GROWTH = 2.5
MOST_MEMORY = 256
"""Bytes of memory per byte of input, beside `FLOOR_BYTES`."""
FLOOR_BYTES = 8 << 20


def _cases() -> list[object]:
    modules = {name: importlib.import_module(f"tests.fuzz.targets.{name}") for name in TARGETS}
    return [
        pytest.param(module.fuzz, grown, id=f"{name}-{what}")
        for name, module in modules.items()
        for what, grown in getattr(module, "GROWING", {}).items()
    ]


def _cpu_s(fuzz: Callable[[bytes], None], data: bytes) -> float:
    began = time.process_time()
    fuzz(data)
    return time.process_time() - began


@pytest.mark.long
@pytest.mark.parametrize(("fuzz", "grown"), _cases())
def test_time_grows_with_the_length(
    fuzz: Callable[[bytes], None], grown: Callable[[int], bytes]
) -> None:
    short, long = grown(BYTES), grown(2 * BYTES)
    fuzz(grown(64))  # imports and caches
    for _ in range(TRIES):
        long_s = _cpu_s(fuzz, long)
        short_s = _cpu_s(fuzz, short)
        if long_s <= max(FLOOR_S, MOST_GROWTH * short_s):
            return
    pytest.fail(f"{len(short)} bytes: {short_s:.2f} s, {len(long)} bytes: {long_s:.2f} s")


@pytest.mark.long
@pytest.mark.parametrize(("fuzz", "grown"), _cases())
def test_memory_grows_with_the_length(
    fuzz: Callable[[bytes], None], grown: Callable[[int], bytes]
) -> None:
    data = grown(2 * BYTES)
    fuzz(grown(64))
    gc.collect()
    tracemalloc.start()
    try:
        fuzz(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= FLOOR_BYTES + MOST_MEMORY * len(data)
