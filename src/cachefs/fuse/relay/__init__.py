"""The relay serves cached blocks without the daemon, and keeps the mount when the daemon ends.

docs/ARCHITECTURE.md describes its design. The compiled part must be loaded before pyfuse3, with
its symbols visible to pyfuse3 (RTLD_GLOBAL). So code that may need it imports this package first.
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
    """Return why this installation has no relay; None if it has one."""
    return _why_not


_load()
