import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs import units
from cachefs.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("4G", 4 << 30),
        ("4g", 4 << 30),
        ("100GiB", 100 << 30),
        ("100 GiB", 100 << 30),
        ("1.5TiB", 3 << 39),
        (".5K", 512),
        ("1KB", 1000),
        ("2.5MB", 2_500_000),
        (" 7K ", 7 << 10),
        ("0.1", 0),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "+1",
        "1 2",
        "1e3",
        "10 parsecs",
        "1Gi",
        "0x10",
        "nan",
        "inf",
        "\u0661",
        "1,5G",
    ],
)
def test_wrong_sizes_are_named_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_size(text)
    assert f'"{text}"' in str(caught.value)
    assert "300MiB" in str(caught.value)


def test_a_size_has_a_limit() -> None:
    assert units.parse_size("7EiB") == 7 << 60
    with pytest.raises(UsageError, match="too large"):
        units.parse_size("8EiB")


@given(st.integers(0, units.SIZE_LIMIT_BYTES - 1))
def test_plain_numbers_are_bytes(size_bytes: int) -> None:
    assert units.parse_size(str(size_bytes)) == size_bytes


@given(st.text(max_size=12))
def test_any_text_parses_or_is_a_usage_error(text: str) -> None:
    for parse in (units.parse_size, units.parse_duration, units.parse_ratio, units.parse_mode):
        try:
            value = parse(text)
        except UsageError:
            continue
        assert value >= 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("600", 600.0),
        ("10m", 600.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("250ms", 0.25),
        ("5 s", 5.0),
        ("indefinite", math.inf),
        ("Indefinite", math.inf),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "inf", "nan", "10 parsecs", "1w", "1m30s", "forever"])
def test_wrong_durations_are_named_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_duration(text)
    assert f'"{text}"' in str(caught.value)
    assert '"indefinite"' in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ratio"), [("0", 0), ("0.1", 0.1), ("10%", 0.1), ("1", 1), ("100 %", 1)]
)
def test_ratios(text: str, ratio: float) -> None:
    assert units.parse_ratio(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["1.1", "101%", "-0.1", "much"])
def test_wrong_ratios(text: str) -> None:
    with pytest.raises(UsageError, match="ratio"):
        units.parse_ratio(text)


@pytest.mark.parametrize(("text", "mode"), [("644", 0o644), ("0644", 0o644), ("0o755", 0o755)])
def test_modes(text: str, mode: int) -> None:
    assert units.parse_mode(text) == mode


@pytest.mark.parametrize("text", ["", "64", "888", "4755", "rwxr-xr-x", "-644"])
def test_wrong_modes(text: str) -> None:
    with pytest.raises(UsageError, match="octal"):
        units.parse_mode(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1023 * 1024 + 512, "1023.5 KiB"),
        (100 << 30, "100 GiB"),
        (5 << 60, "5 EiB"),
    ],
)
def test_bytes_are_shown_short(size_bytes: int, text: str) -> None:
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (12.4, "12s"),
        (600, "10m"),
        (3600, "1h"),
        (12000, "3h 20m"),
        (86400 + 30, "1d"),
        (90061, "1d 1h"),
        (math.inf, "indefinite"),
    ],
)
def test_durations_are_shown_short(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text
