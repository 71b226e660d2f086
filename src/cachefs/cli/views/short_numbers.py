"""Numbers in at most four or five characters, for tables that are redrawn."""

_COUNTS = ("", "k", "M", "G", "T", "P")
_BYTES = ("", "K", "M", "G", "T", "P", "E")
_TIMES = ((1e-6, "us"), (1e-3, "ms"))


def short_count(count: float) -> str:
    """Return at most four characters: "0", "0.3", "12", "999", "1.2k", "12k"."""
    if 0 < count < 1:
        return f"{max(count, 0.1):.1f}" if count < 0.95 else "1"
    return _short(count, 1000, _COUNTS)


def short_bytes(size_bytes: float) -> str:
    """Return at most four characters, in powers of 1024: "0", "1.2K", "12M", "999M", "1.0G"."""
    return _short(size_bytes, 1024, _BYTES)


def short_time(seconds: float | None) -> str:
    """Return at most five characters: "8us", "131us", "1.2ms", "12ms", "1.2s", "17s", "-" for
    None."""
    if seconds is None:
        return "-"
    for unit_s, unit in _TIMES:
        value = seconds / unit_s
        if round(value) < 1000:
            return f"{value:.1f}{unit}" if unit == "ms" and value < 9.95 else f"{value:.0f}{unit}"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"


def short_share(share: float | None) -> str:
    """Return a percentage of at most four characters; "-" for None. A share below 1 never gives
    "100%"."""
    if share is None:
        return "-"
    percent = int(share * 100) if share < 1 else round(share * 100)
    return f"{percent}%"


def _short(value: float, base: int, units: tuple[str, ...]) -> str:
    number = 0
    while round(value) >= 1000 and number < len(units) - 1:
        value, number = value / base, number + 1
    return (
        f"{value:.1f}{units[number]}" if number and value < 9.95 else f"{value:.0f}{units[number]}"
    )
