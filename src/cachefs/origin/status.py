"""What the status of an HTTP answer means, for all origins that speak HTTP."""

_TEMPORARY = (408, 425, 429)
_NOT_IMPLEMENTED = 501


def is_definite(status: int) -> bool:
    """Whether the same request would get the same answer: it concerns one object or one request,
    and says that the server works."""
    return (400 <= status < 500 and status not in _TEMPORARY) or status == _NOT_IMPLEMENTED
