"""Fetching ahead must never cost a read, or the mount: what goes wrong here is logged and left."""

import logging

log = logging.getLogger(__name__)

_reported: set[type[Exception]] = set()


def report(error: Exception) -> None:
    """Log a bug with its traceback, once for each kind."""
    if type(error) not in _reported:
        _reported.add(type(error))
        log.error("bug while fetching ahead; nothing else is affected", exc_info=error)
