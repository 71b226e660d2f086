"""Which ranges of a file were written, and where the content of a range comes from."""

from array import array
from bisect import bisect_left, bisect_right
from enum import Enum
from typing import NamedTuple


class Source(Enum):
    """Where the bytes of a piece are."""

    SPOOL = "spool"
    BASE = "base"
    ZEROS = "zeros"
    UPLOAD = "upload"
    """Only the origin has them, in parts of an upload that is not complete: nobody can read them.
    """


class Piece(NamedTuple):
    """A range of a file whose bytes come from one source. The offset is the same in the file, in
    the spool file and in the base."""

    source: Source
    offset: int
    length: int


class Extents:
    """Ranges of a file, sorted, that neither overlap nor touch. Adding a range takes a few
    microseconds, and 16 bytes of memory for each range that doesn't touch another."""

    __slots__ = ("_begins", "_ends", "total_bytes")

    def __init__(self) -> None:
        self._begins = array("Q")
        self._ends = array("Q")
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def end(self) -> int:
        """The end of the last range; 0 without one."""
        return self._ends[-1] if self._ends else 0

    def bounds(self, first: int, count: int) -> "array[int]":
        """Return begin and end of up to `count` ranges, one after the other, from number `first`
        on."""
        bounds = array("Q", bytes(16 * len(self._begins[first : first + count])))
        bounds[::2] = self._begins[first : first + count]
        bounds[1::2] = self._ends[first : first + count]
        return bounds

    def add(self, begin: int, end: int) -> None:
        """Add [begin, end), merged with the ranges that it overlaps or touches."""
        if begin >= end:
            return
        if not self._ends or begin > self._ends[-1]:
            self._begins.append(begin)
            self._ends.append(end)
            self.total_bytes += end - begin
            return
        first = bisect_left(self._ends, begin)
        stop = bisect_right(self._begins, end)
        if first < stop:
            begin = min(begin, self._begins[first])
            end = max(end, self._ends[stop - 1])
            for index in range(first, stop):
                self.total_bytes -= self._ends[index] - self._begins[index]
        self._begins[first:stop] = array("Q", (begin,))
        self._ends[first:stop] = array("Q", (end,))
        self.total_bytes += end - begin

    def next_from(self, offset: int) -> int | None:
        """Return the first offset from `offset` on that is in a range; None if there is none."""
        index = bisect_right(self._ends, offset)
        return max(offset, self._begins[index]) if index < len(self._begins) else None

    def cut(self, size_bytes: int) -> None:
        """Drop everything from `size_bytes` on."""
        keep = bisect_left(self._begins, size_bytes)
        for index in range(keep, len(self._begins)):
            self.total_bytes -= self._ends[index] - self._begins[index]
        del self._begins[keep:]
        del self._ends[keep:]
        if keep and self._ends[-1] > size_bytes:
            self.total_bytes -= self._ends[-1] - size_bytes
            self._ends[-1] = size_bytes

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [begin, end) that are in a range."""
        found = []
        for index in range(bisect_right(self._ends, begin), len(self._begins)):
            if self._begins[index] >= end:
                break
            found.append((max(begin, self._begins[index]), min(end, self._ends[index])))
        return found


def pieces_of(extents: Extents, base_bytes: int, begin: int, end: int) -> list[Piece]:
    """Return the pieces that make up [begin, end) of a file that tracks extents.

    What was written comes from the spool file. Elsewhere the first `base_bytes` of the base show,
    and behind them zeros."""
    pieces: list[Piece] = []
    position = begin
    for start, stop in [*extents.within(begin, end), (end, end)]:
        if position < min(start, base_bytes):
            pieces.append(Piece(Source.BASE, position, min(start, base_bytes) - position))
            position = min(start, base_bytes)
        if position < start:
            pieces.append(Piece(Source.ZEROS, position, start - position))
        if start < stop:
            pieces.append(Piece(Source.SPOOL, start, stop - start))
        position = stop
    return pieces
