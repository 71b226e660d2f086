"""Parse whole numbers in texts that come from other programs: HTTP headers, listings, answers of
memcached.

Python's `int` takes "1_0", "+1", " 1 " and the digits of all scripts, too, and raises an error for
thousands of digits.
"""

import re

_DIGITS = {
    8: re.compile("[0-7]{1,21}"),
    10: re.compile("[0-9]{1,19}"),
    16: re.compile("[0-9A-Fa-f]{1,16}"),
}
"""By base, as many digits as a 64-bit number may need."""


def whole_number(text: str | bytes, base: int = 10) -> int | None:
    """Return the number that the text is, and nothing else: only ASCII digits of the base (8, 10 or
    16), and no more than a 64-bit number may need. None for any other text."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    return int(text, base) if _DIGITS[base].fullmatch(text) else None
