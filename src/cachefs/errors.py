"""The one exception tree.

Every error that cachefs raises on purpose is a `CachefsError`. Its text is one line fit for a
user: what failed, why, and what to do. `fuse/errno_map.py` turns the tree into errno values and
`cli/` prints it; nothing else translates errors. Messages never contain credentials.
"""


class CachefsError(Exception):
    """Base of every expected failure."""


class UsageError(CachefsError):
    """An option, a configuration file or a command was wrong. Exit code 2."""


class MountError(CachefsError):
    """The mountpoint can't be used, or the kernel refused the mount."""


class RelayUnusableError(MountError):
    """A mount can't be served through the relay. The text is the reason alone."""


class CacheDirError(CachefsError):
    """A cache directory can't be used: not writable, in use, foreign, or of a newer format."""


class OriginError(CachefsError):
    """The store that holds the data failed."""


class NotFoundError(OriginError):
    """There is no such object, directory or bucket. ENOENT."""


def reason_of(error: OSError) -> str:
    """For a user: what the system said, and of which file."""
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename is not None else said


class NotADirError(OriginError):
    """A directory was expected and an object was found. ENOTDIR."""


class AccessDeniedError(OriginError):
    """The origin refused the credentials, or these may not do this. EACCES."""


class ObjectChangedError(OriginError):
    """The object is no longer the version that was asked for. ESTALE."""


class OriginUnavailableError(OriginError):
    """The origin can't be reached, timed out, or answered with a server error. EIO."""


class OriginBusyError(OriginUnavailableError):
    """The origin said that it has too much to do (429, 503): ask again, later and less. EIO.

    `retry_after_s` is how long it wants to be left alone, None if it didn't say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadDataError(OriginError):
    """The origin answered with too few, too many or wrong bytes. EIO."""
