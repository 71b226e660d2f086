"""Log bugs of prefetching. Such a bug must never make a read fail or end the mount."""

import logging

log = logging.getLogger(__name__)

_reported: set[type[Exception]] = set()


def report_bug(error: Exception) -> None:
    """Log a bug with its traceback, once per exception type."""
    if type(error) not in _reported:
        _reported.add(type(error))
        log.error("bug while fetching ahead; nothing else is affected", exc_info=error)
