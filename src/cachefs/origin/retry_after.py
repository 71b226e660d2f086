"""Parses the HTTP header Retry-After."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from cachefs.foreign_numbers import whole_number


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds from now that a number or a date states; None for anything else."""
    text = (value or "").strip()
    seconds = whole_number(text)
    if seconds is not None:
        return float(seconds)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # a time zone of many digits overflows
        return None
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
