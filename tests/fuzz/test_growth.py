"""Each parser takes little time and memory for each byte: no answer, page or file occupies the
interpreter for long.

A target names inputs in `GROWING`: functions that return about as many bytes as they are told. They
are given to each of its `PARSERS`, or else to `fuzz`. `MOST_BYTES` is the longest input that its
parsers take.
"""

import gc
import importlib
import logging
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.fuzz.engine import TARGETS

BYTES = 1 << 18
TRIES = 5
MOST_GROWTH = 2.5
"""Of the time, for twice the input."""
FLOOR_S = 0.03
"""Less than this tells nothing about growth on a busy machine."""
FIXED_S = 0.015
"""What an input may take, however short it is: the targets make directories, sockets and loops."""
STEPS = 60_000
STEPS_S = 0.0060
"""The CPU time of so many steps on the machine for which the bounds were written."""


class Bound(NamedTuple):
    """The CPU time for a MB of input, and the bytes of memory for each byte of it."""

    ms_per_mb: float = 50.0
    memory: float = 10.0
    fixed_bytes: int = 1 << 20
    """Beside them, however short the input is."""


USUAL = Bound()
HIGHER = {
    # The parser of Python's library is written in Python, and makes an object of each table. A
    # command reads the file, not the mount, and it has at most 1 MiB.
    "config": Bound(1500, 150),
    # The target makes a whole mount, without a kernel.
    "control": Bound(fixed_bytes=20 << 20),
    # The target itself cuts the headers; the server bounds the head of a real request.
    "console: headers": Bound(100, 50),
    # Linux bounds a variable of the environment to 128 KiB.
    "fluid_config: options": Bound(150, 30),
    # .8 us in Python for each tag or link, of which the shortest have ten bytes. It happens in
    # fsspec's thread; a page has at most 64 MiB and 500,000 names.
    "index_page": Bound(200),
    # Expat calls Python twice for each tag: .6 us for the four bytes of the shortest. It happens in
    # a worker thread; a page has at most 16 MiB, and 40 tags for each row.
    "listing": Bound(300),
    # The same. An answer has at most 4 MiB and 100,000 tags.
    "write_answers": Bound(300),
    # 1 us for each line, of which the shortest have two bytes. The target holds all lines at once;
    # a job takes 1 MiB at a time.
    "load_list": Bound(1300, 60),
    # 2 us for each line, of which the shortest have six bytes here. They are read one by
    # one.
    "manifest": Bound(600),
    # Each name goes into the namespace: 10 us for 80 bytes. A request has at most 1 MiB.
    "metadata_import": Bound(600, 40, 4 << 20),
    # 3 us for each record of 36 bytes, and .6 us for each two bytes that may be the head of a
    # record. Only who may write to the spool can make such a journal.
    "spool_journal": Bound(300),
    "spool_journal: heads": Bound(1300),
}
"""By target, or by target and input: what can't keep to the usual bound, and why."""

ROWS = "each row goes through a database on disk, one by one, and has a bounded length"
NOT_MEASURED = {
    "index_rows": ROWS,
    "namespace_rows": ROWS,
    "slab": "headers and entries of a slab file have fixed sizes",
    "keeper": "the kernel bounds a message; each is parsed alone, by the JSON of the library",
    "metadata_file": "pyarrow reads the file in batches of a bounded number of rows",
}


@pytest.fixture
def _unheard() -> Iterator[None]:
    """What is logged of nonsense is nobody's concern here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _cases() -> list[object]:
    return [
        pytest.param(
            parser,
            grown,
            getattr(module, "MOST_BYTES", BYTES),
            HIGHER.get(f"{name}: {what}", HIGHER.get(name, USUAL)),
            id=f"{name}-{what}-{number}",
        )
        for name in TARGETS
        for module in [importlib.import_module(f"tests.fuzz.targets.{name}")]
        for number, parser in enumerate(getattr(module, "PARSERS", (module.fuzz,)))
        for what, grown in getattr(module, "GROWING", {}).items()
    ]


def _slowness() -> float:
    """How much longer this machine takes at present than the one for which the bounds were
    written; at least 1. Another process on the same core slows down both."""
    began = time.process_time()
    found: dict[str, int] = {}
    for number in range(STEPS):
        found[str(number & 255)] = number
    return max(1.0, (time.process_time() - began) / STEPS_S)


def _cpu_s(parse: Callable[[bytes], object], data: bytes) -> float:
    began = time.process_time()
    parse(data)
    return time.process_time() - began


def test_every_target_is_measured() -> None:
    measured = {
        name
        for name in TARGETS
        if getattr(importlib.import_module(f"tests.fuzz.targets.{name}"), "GROWING", {})
    }
    assert measured == set(TARGETS) - set(NOT_MEASURED)


@pytest.mark.long
@pytest.mark.usefixtures("_unheard")
@pytest.mark.parametrize(("parse", "grown", "most_bytes", "bound"), _cases())
def test_time(
    parse: Callable[[bytes], object], grown: Callable[[int], bytes], most_bytes: int, bound: Bound
) -> None:
    size = min(BYTES, most_bytes)
    short, long = grown(size // 2), grown(size)
    parse(grown(64))  # imports and caches
    long_s = short_s = math.inf
    slowness = 0.0
    for _ in range(TRIES):
        slowness = max(slowness, _slowness())
        long_s, short_s = min(long_s, _cpu_s(parse, long)), min(short_s, _cpu_s(parse, short))
        slowness = max(slowness, _slowness())
        per_byte_s = bound.ms_per_mb / 1000 / (1 << 20)
        if (
            long_s <= slowness * (FIXED_S + per_byte_s * len(long))
            and short_s <= slowness * (FIXED_S + per_byte_s * len(short))
            and long_s <= max(slowness * FLOOR_S, MOST_GROWTH * short_s)
        ):
            return
    pytest.fail(
        f"{len(short)} bytes: {short_s:.3f} s, {len(long)} bytes: {long_s:.3f} s, on a machine "
        f"that takes {slowness:.1f} times as long as another"
    )


@pytest.mark.long
@pytest.mark.usefixtures("_unheard")
@pytest.mark.parametrize(("parse", "grown", "most_bytes", "bound"), _cases())
def test_memory(
    parse: Callable[[bytes], object], grown: Callable[[int], bytes], most_bytes: int, bound: Bound
) -> None:
    data = grown(min(BYTES, most_bytes))
    parse(grown(64))
    gc.collect()
    tracemalloc.start()
    try:
        parse(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= bound.fixed_bytes + bound.memory * len(data)
