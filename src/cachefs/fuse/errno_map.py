"""The only place that converts an exception to an errno."""

import errno

from cachefs.errors import (
    AccessDeniedError,
    CachefsError,
    ConflictError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    ObjectChangedError,
    SpoolFullError,
)

_ERRNO: tuple[tuple[type[CachefsError], int], ...] = (
    (NotFoundError, errno.ENOENT),
    (NotADirError, errno.ENOTDIR),
    (AccessDeniedError, errno.EACCES),
    (ObjectChangedError, errno.ESTALE),
    (ConflictError, errno.ESTALE),
    (NotEmptyError, errno.ENOTEMPTY),
    (SpoolFullError, errno.ENOSPC),
)


def errno_of(error: CachefsError) -> int:
    """Return the errno of an error; EIO for an error type without its own errno."""
    for kind, number in _ERRNO:
        if isinstance(error, kind):
            return number
    return errno.EIO
