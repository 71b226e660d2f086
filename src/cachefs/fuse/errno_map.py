"""The only place that converts an exception to an errno."""

import errno

from cachefs.errors import (
    AccessDeniedError,
    BadNameError,
    CachefsError,
    ConflictError,
    ExistsError,
    FileTooLargeError,
    IsADirError,
    NameTooLongError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    ObjectChangedError,
    OriginFullError,
    QuotaError,
    SpoolFullError,
    TooManyError,
)

_ERRNO: tuple[tuple[type[CachefsError], int], ...] = (
    (NotFoundError, errno.ENOENT),
    (NotADirError, errno.ENOTDIR),
    (AccessDeniedError, errno.EACCES),
    (ObjectChangedError, errno.ESTALE),
    (ConflictError, errno.ESTALE),
    (NotEmptyError, errno.ENOTEMPTY),
    (SpoolFullError, errno.ENOSPC),
    (QuotaError, errno.EDQUOT),
    (OriginFullError, errno.ENOSPC),
    (FileTooLargeError, errno.EFBIG),
    (ExistsError, errno.EEXIST),
    (IsADirError, errno.EISDIR),
    (BadNameError, errno.EINVAL),
    (NameTooLongError, errno.ENAMETOOLONG),
    (TooManyError, errno.EOPNOTSUPP),
)


def errno_of(error: CachefsError) -> int:
    """Return the errno of an error; EIO for an error type without its own errno."""
    for kind, number in _ERRNO:
        if isinstance(error, kind):
            return number
    return errno.EIO
