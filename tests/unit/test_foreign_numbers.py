"""Numbers in texts of other programs, and the parsers that read such texts."""

import pytest

from cachefs.errors import BadDataError
from cachefs.foreign_numbers import whole_number
from cachefs.origin.s3.listing import parse_page
from cachefs.origin.s3.writing.messages import described
from cachefs.shared.wire import read_stats

ODD = ("1_0", "+10", "-10", " 10", "10 ", "10\n", "0x10", "", "²", "٣", "1e3", "1.0", "9" * 5_000)


@pytest.mark.parametrize("text", ODD)
def test_only_digits_are_a_number(text: str) -> None:
    for base in (8, 10, 16):
        assert whole_number(text, base) is None or (text, base) == ("1e3", 16)
        assert whole_number(text.encode(), base) is None or (text, base) == ("1e3", 16)


def test_numbers() -> None:
    assert [whole_number(text) for text in ("0", "007", "18446744073709551")] == [
        *(0, 7, 18446744073709551)
    ]
    assert whole_number(b"fF", 16) == 255
    assert whole_number("1755", 8) == 0o1755
    assert whole_number("8", 8) is None


@pytest.mark.parametrize("text", ODD)
def test_odd_lengths_are_no_lengths(text: str) -> None:
    with pytest.raises(BadDataError):
        described({"content-length": text})
    assert read_stats([b"STAT bytes " + text.encode()]) == {}


def test_an_odd_size_in_a_listing_is_not_shown() -> None:
    row = "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag>"
    row += "<Size>{}</Size></Contents>"
    rows = row.format("right", 10) + row.format("odd", "1_0") + row.format("negative", -1)
    page = parse_page(f"<ListBucketResult>{rows}</ListBucketResult>".encode(), "")
    assert [entry.name for entry in page.entries] == ["right"]
