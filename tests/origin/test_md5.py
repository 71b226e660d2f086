"""The MD5 of several buffers at a time (`origin/http/md5.c`) is the one of hashlib."""

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.origin.http import _engine
from cachefs.origin.s3 import digest

NEAR_THE_END_OF_A_BLOCK = [0, 1, 54, 55, 56, 57, 63, 64, 65, 119, 120, 121, 127, 128, 129]


def of_each(datas: list[bytes]) -> list[bytes]:
    return [hashlib.md5(data, usedforsecurity=False).digest() for data in datas]


@given(st.lists(st.binary(max_size=200), max_size=40))
def test_any_buffers(datas: list[bytes]) -> None:
    assert _engine.md5_of_each(datas) == of_each(datas)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 40])
def test_sizes_around_a_block(count: int) -> None:
    chance = random.Random(count)
    for _ in range(200):
        sizes = chance.choices([*NEAR_THE_END_OF_A_BLOCK, 1000, 3000], k=count)
        datas = [chance.randbytes(size) for size in sizes]
        assert _engine.md5_of_each(datas) == of_each(datas)


def test_one_long_buffer_among_short_ones() -> None:
    datas = [bytes(10), random.Random(1).randbytes(1 << 20), *[b"x" * n for n in range(100)]]
    assert _engine.md5_of_each(datas) == of_each(datas)


def test_parts_of_buffers_at_odd_addresses() -> None:
    whole = memoryview(bytearray(random.Random(2).randbytes(5000)))
    parts = [whole[start : start + 1000 + start] for start in range(1, 20)]
    assert _engine.md5_of_each(parts) == of_each([bytes(part) for part in parts])


def test_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        _engine.md5_of_each([b"x", "text"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _engine.md5_of_each(3)  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        _engine.md5_of_each([b"x", memoryview(b"abcdef")[::2]])


@pytest.mark.parametrize("count", range(6))
def test_a_few_are_hashed_one_after_the_other(count: int) -> None:
    datas = [b"x" * number for number in range(count)]
    assert digest.md5_of_each(datas) == of_each(datas)
