"""How many files the processes of a mount may have open."""

import resource

from cachefs.errors import UsageError

LEAST_OPEN_FILES = 192
"""What a daemon needs for itself, for connections, and for some slabs (`tiers/open_slabs.py`)."""
_OPEN_FILES = 1 << 17
"""One descriptor a slab file, for as many as a cache usually has (`tiers/tier.py`); of more of them
those that were read lately are open."""


def raise_file_limit() -> None:
    """As far as this user may. Raises `UsageError` if that is not enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if wanted < LEAST_OPEN_FILES:
        raise UsageError(
            f"a process may have only {hard} files open here, and a mount needs "
            f"{LEAST_OPEN_FILES}: raise the limit (ulimit -n, or LimitNOFILE= of a systemd unit)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
