"""Which ranges were written, compared with a set of bytes (`staging/extents.py`)."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cachefs.staging.extents import Extents, Piece, Source, pieces_of

SIZE = 60
OFFSETS = st.integers(0, SIZE)
STEPS = st.lists(st.tuples(st.booleans(), OFFSETS, OFFSETS), max_size=40)


def build(steps: list[tuple[bool, int, int]]) -> tuple[Extents, set[int]]:
    """Ranges that were added, or everything behind an offset cut."""
    extents, expected = Extents(), set()
    for is_cut, first, second in steps:
        if is_cut:
            extents.cut(first)
            expected = {at for at in expected if at < first}
        else:
            begin, end = sorted((first, second))
            extents.add(begin, end)
            expected |= set(range(begin, end))
    return extents, expected


@given(STEPS)
def test_ranges_are_merged_and_counted(steps: list[tuple[bool, int, int]]) -> None:
    extents, expected = build(steps)
    bounds = extents.bounds(0, len(extents))
    ranges = list(zip(bounds[::2], bounds[1::2], strict=True))
    assert {at for begin, end in ranges for at in range(begin, end)} == expected
    assert all(begin < end for begin, end in ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges)), "none touch"
    assert extents.total_bytes == len(expected)
    assert extents.end == max(expected, default=-1) + 1
    assert len(extents) == len(ranges)


@given(STEPS, OFFSETS, OFFSETS, OFFSETS)
def test_pieces_are_in_order_and_without_gaps(
    steps: list[tuple[bool, int, int]], base_bytes: int, first: int, second: int
) -> None:
    extents, written = build(steps)
    begin, end = sorted((first, second))
    pieces = pieces_of(extents, base_bytes, begin, end)
    found = {}
    position = begin
    for source, offset, length in pieces:
        assert offset == position
        assert length > 0
        position += length
        found |= dict.fromkeys(range(offset, position), source)
    assert position == end
    for at in range(begin, end):
        if at in written:
            assert found[at] is Source.SPOOL
        else:
            assert found[at] is (Source.BASE if at < base_bytes else Source.ZEROS)


def test_bounds() -> None:
    extents = Extents()
    for begin in range(0, 50, 10):
        extents.add(begin, begin + 5)
    assert list(extents.bounds(1, 2)) == [10, 15, 20, 25]
    assert list(extents.bounds(4, 9)) == [40, 45]
    assert list(extents.bounds(5, 9)) == []


def test_pieces_of_a_changed_file() -> None:
    extents = Extents()
    extents.add(10, 20)
    extents.add(40, 50)
    assert pieces_of(extents, 30, 5, 55) == [
        Piece(Source.BASE, 5, 5),
        Piece(Source.SPOOL, 10, 10),
        Piece(Source.BASE, 20, 10),
        Piece(Source.ZEROS, 30, 10),
        Piece(Source.SPOOL, 40, 10),
        Piece(Source.ZEROS, 50, 5),
    ]
