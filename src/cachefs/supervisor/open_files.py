"""The limit of open files for the processes of a mount."""

import resource

from cachefs.errors import UsageError

LEAST_OPEN_FILES = 192
"""Descriptors that a daemon needs: its own, connections, and some slabs
(`cache_dir/open_slabs.py`)."""
_OPEN_FILES = 1 << 17
"""One descriptor for each slab file, for as many files as a cache usually has
(`cache_dir/directory.py`). If there are more files, only recently read ones are open."""


def raise_file_limit() -> None:
    """Raise the limit of open files as far as this user may.

    Raises `UsageError` if that is less than `LEAST_OPEN_FILES`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if wanted < LEAST_OPEN_FILES:
        raise UsageError(
            f"a process may have only {hard} files open here, and a mount needs "
            f"{LEAST_OPEN_FILES}: raise the limit (ulimit -n, or LimitNOFILE= of a systemd unit)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
