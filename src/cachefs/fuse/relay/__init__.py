"""The relay: cached blocks are served without the daemon, and the mount outlives it.

What it is and why stands in docs/ARCHITECTURE.md. The compiled part must be loaded before pyfuse3,
with its symbols visible to it: so whoever may need it imports this package first.
"""

import os
import sys

_why_not: str | None = None


def _load() -> None:
    global _why_not
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        from cachefs.fuse.relay import _relay  # noqa: F401
    except ImportError as error:
        _why_not = f"the compiled part is missing or can't be loaded: {error}"
    finally:
        sys.setdlopenflags(flags)


def why_not() -> str | None:
    """Why there is no relay in this installation; None if there is."""
    return _why_not


_load()
