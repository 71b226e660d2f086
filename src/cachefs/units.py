"""Parse sizes, durations, ratios and modes that users write; format sizes and durations for
users."""

import math
import re

from cachefs.errors import UsageError

SIZE_FORMS = 'a number of bytes with an optional unit, such as "512", "300MiB", "1.5TiB" or "4G"'
DURATION_FORMS = (
    'seconds or a number with ms, s, m, h or d, such as "600" or "10m", or "indefinite"'
)
RATIO_FORMS = 'a number from 0 to 1, such as "0.1", or a percentage such as "10%"'

SIZE_LIMIT_BYTES = 1 << 63
"""All sizes are smaller than this."""

_PREFIXES = "KMGTPE"
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtpe])(i?b)?|b)?", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d)?", re.IGNORECASE | re.ASCII)
_RATIO = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Return bytes, rounded down. A plain number is bytes.

    `K`, `M`, `G`, `T`, `P`, `E` and `KiB`, ... are powers of 1024; `KB`, `MB`, ... are powers
    of 1000. Case does not matter. Raises `UsageError` for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'"{text}" is not a size; write {SIZE_FORMS}')
    number, prefix, suffix = match.groups()
    factor = 1
    if prefix is not None:
        base = 1000 if (suffix or "").lower() == "b" else 1024
        factor = base ** (_PREFIXES.index(prefix.upper()) + 1)
    whole, _, fraction = number.partition(".")
    size_bytes = int(whole or 0) * factor + int(float(f"0.{fraction or 0}") * factor)
    if size_bytes >= SIZE_LIMIT_BYTES:
        raise UsageError(f'"{text}" is too large a size; the limit is below 8EiB')
    return size_bytes


def parse_duration(text: str) -> float:
    """Return seconds; `math.inf` for "indefinite". Raises `UsageError` for invalid text."""
    if text.strip().lower() == "indefinite":
        return math.inf
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'"{text}" is not a duration; write {DURATION_FORMS}')
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def parse_ratio(text: str) -> float:
    """Return a ratio from a number from 0 to 1 or a percentage. Raises `UsageError` for anything
    else."""
    match = _RATIO.fullmatch(text.strip())
    ratio = math.inf
    if match is not None:
        number, percent = match.groups()
        ratio = float(number) / (100 if percent else 1)
    if ratio > 1:
        raise UsageError(f'"{text}" is not a ratio; write {RATIO_FORMS}')
    return ratio


def parse_mode(text: str) -> int:
    """Return permission bits from octal digits such as "644" or "0o644". Raises `UsageError`."""
    digits = text.strip().lower().removeprefix("0o")
    if not re.fullmatch(r"0?[0-7]{3}", digits):
        raise UsageError(f'"{text}" is not a file mode; write three octal digits such as "644"')
    return int(digits, 8)


def format_bytes(size_bytes: int) -> str:
    """Return a size with a binary unit and at most one decimal: "0 B", "1.5 KiB", "100 GiB"."""
    value = float(size_bytes)
    unit = "B"
    for prefix in _PREFIXES:
        if round(value, 1) < 1024:
            break
        value /= 1024
        unit = f"{prefix}iB"
    text = f"{value:.1f}".removesuffix(".0")
    return f"{text} {unit}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: "indefinite", "0s", "12s", "10m", "3h 20m",
    "2d 1h"."""
    if math.isinf(seconds):
        return "indefinite"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    rest = round(seconds)
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, int(_SECONDS[unit]))
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0s"
