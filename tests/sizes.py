"""How much a test does: little in `make test`, all of it in `make test-long`."""

import os

IS_LONG = os.environ.get("CACHEFS_LONG_TESTS") == "1"


def size(usual: int, long: int) -> int:
    """Return `usual`, or `long` in `make test-long`."""
    return long if IS_LONG else usual
