"""The only place where an exception becomes an errno."""

import errno

from cachefs.errors import (
    AccessDeniedError,
    CachefsError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
)

_ERRNO: tuple[tuple[type[CachefsError], int], ...] = (
    (NotFoundError, errno.ENOENT),
    (NotADirError, errno.ENOTDIR),
    (AccessDeniedError, errno.EACCES),
    (ObjectChangedError, errno.ESTALE),
)


def errno_of(error: CachefsError) -> int:
    """The errno of an error; EIO for all that has none of its own."""
    for kind, number in _ERRNO:
        if isinstance(error, kind):
            return number
    return errno.EIO
