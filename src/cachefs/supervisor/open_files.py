"""How many files the processes of a mount may have open."""

import resource

_OPEN_FILES = 1 << 17
"""One descriptor a slab: 64 MiB times this is 8 TiB of cache."""


def raise_file_limit() -> None:
    """As far as this user may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
