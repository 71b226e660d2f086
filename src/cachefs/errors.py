"""The only exception tree.

Every error that cachefs raises on purpose is a `CachefsError`. Its text is one line for the user:
what failed, why, and what to do. `fuse/errno_map.py` maps the tree to errno values and `cli/`
prints it; no other module translates errors. Messages never contain credentials.
"""

from errno import EPERM


class CachefsError(Exception):
    """Base of every expected failure."""


class UsageError(CachefsError):
    """An option, a configuration file or a command was wrong. Exit code 2."""


class MountError(CachefsError):
    """The mountpoint can't be used, or the kernel refused the mount."""


class RelayUnusableError(MountError):
    """The relay can't serve a mount. The text is only the reason."""


class UntrustedPathError(CachefsError, OSError):
    """A path leads through another user's hands, or not to a regular file. `strerror` is the text,
    so that it fits where any other reason of the system is shown; `errno` is EPERM."""

    def __init__(self, reason: str) -> None:
        OSError.__init__(self, EPERM, reason)

    def __str__(self) -> str:
        return str(self.strerror)


class CacheDirError(CachefsError):
    """A cache directory can't be used: not writable, in use, foreign, or of a newer format."""


class SpoolError(CachefsError):
    """The spool of a writable mount can't be used: foreign, in use, damaged, or of a newer format.
    EIO."""


class SpoolFullError(SpoolError):
    """The spool, or its disk, has no room for what is to be written. ENOSPC."""


class PartsLostError(SpoolError):
    """The spool no longer has the first parts of a file, because it is larger than the spool, and
    the origin has lost them, or can't use them. EIO."""


class FileTooLargeError(SpoolError):
    """The spool, its disk or cachefs can't have a file of this size. EFBIG."""


class WorkersStoppedError(CachefsError):
    """The threads for this call have ended: the mount ends, or the tier is being removed. EIO."""


class OriginError(CachefsError):
    """The store that holds the data failed."""


class NotFoundError(OriginError):
    """There is no such object, directory or bucket. ENOENT."""


class UploadLostError(NotFoundError):
    """The upload has been completed or aborted, or a part of it is not there or not accepted."""


class NotADirError(OriginError):
    """A directory was expected and an object was found. ENOTDIR."""


class ExistsError(CachefsError):
    """The name exists already. EEXIST."""


class IsADirError(CachefsError):
    """A file was expected and a directory was found. EISDIR."""


class BadNameError(CachefsError):
    """The origin can't have an object of this name. EINVAL."""


class NameTooLongError(CachefsError):
    """A name has more than 255 bytes, or a path is longer than what keeps it. ENAMETOOLONG."""


class TooManyError(CachefsError):
    """The directory has too many names to rename it. EOPNOTSUPP."""


class AccessDeniedError(OriginError):
    """The origin refused the credentials, or they do not allow the request. EACCES."""


class ObjectChangedError(OriginError):
    """The object no longer has the requested version. ESTALE."""


class ConflictError(OriginError):
    """The condition of a write is false: the object has another version, or there is one already.
    Nothing was changed. ESTALE."""


class NotEmptyError(OriginError):
    """A directory that is to be removed or replaced has entries. ENOTEMPTY."""


class RefusedError(OriginError):
    """The origin has answered that it refuses this object or this request. This says nothing about
    other objects, and a retry has no use. EIO."""


class OriginUnavailableError(OriginError):
    """The origin can't be reached, timed out, or answered with a server error. EIO."""


class OriginBusyError(OriginUnavailableError):
    """The origin is overloaded (429, 503): retry later, with fewer requests. EIO.

    `retry_after_s` is the delay that the origin asks for, None without one.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CredentialsError(OriginUnavailableError):
    """There are no credentials at present, or they have ended. Others may come, so this is no
    denial. EIO."""


class OriginFullError(OriginError):
    """The origin has no room for what is to be written. ENOSPC."""


class QuotaError(OriginFullError):
    """A quota of the origin allows no more bytes or objects. EDQUOT."""


class NotOfferedError(RefusedError):
    """The store does not have this kind of request. EIO."""


class UntrustedOriginError(OriginUnavailableError):
    """The certificate of the origin is refused, so a retry has no use. EIO."""


class BadDataError(OriginError):
    """The origin answered with too few, too many or wrong bytes. EIO."""


def reason_of(error: OSError) -> str:
    """Return the system's error text for a user, with the file if there is one."""
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename is not None else said
