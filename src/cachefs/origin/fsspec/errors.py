"""Maps errors of fsspec's file systems to `cachefs.errors`."""

import errno
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError, NoCredentialsError

from cachefs.errors import (
    AccessDeniedError,
    NotADirError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
    reason_of,
)
from cachefs.origin.retry_after import parse_retry_after
from cachefs.origin.status import is_definite

_BUSY_STATUS = (429, 503)
_GONE = 410
TEMPORARY_ERRNOS = (
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
    errno.ETIMEDOUT,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
)
"""Errors of the system that say something of this machine now, not of the file."""


def from_fsspec(subject: str, error: Exception) -> OriginError:
    """Return the exception for `error`. `subject` is the URL of the failed access."""
    kind = type(error).__name__
    if isinstance(error, OriginError):
        return error
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{subject} does not exist")
    if isinstance(error, NotADirectoryError):
        return NotADirError(f"{subject}: a part of the path is a file")
    if isinstance(error, PermissionError | NoCredentialsError):
        return AccessDeniedError(f"access denied to {subject} ({kind}): check the credentials")
    if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") == "403":
        return AccessDeniedError(f"access denied to {subject}: check the credentials")
    status, headers = _http_answer(error)
    if status in (401, 403):
        return AccessDeniedError(f"access denied to {subject} (HTTP {status})")
    if status in _BUSY_STATUS:
        return OriginBusyError(
            f"{subject} can't be read (HTTP {status})",
            parse_retry_after(headers.get("retry-after")),
        )
    if status == _GONE:
        return NotFoundError(f"{subject} does not exist any more")
    if status is not None and is_definite(status):
        return RefusedError(f"{subject} can't be read: the server refuses it (HTTP {status})")
    reason = kind if status is None else f"HTTP {status}"
    return OriginUnavailableError(f"{subject} can't be read ({reason})")


def from_os(subject: str, error: OSError, root_answers: bool) -> OriginError:
    """Return the exception for an error of the system while a local file was read.
    `root_answers`: the source itself can be looked at, so the error concerns this file alone."""
    mapped = from_fsspec(subject, error)
    if not isinstance(mapped, OriginUnavailableError):
        return mapped
    why = reason_of(OSError(error.errno, error.strerror))
    is_definite = root_answers and error.errno not in TEMPORARY_ERRNOS
    return (RefusedError if is_definite else OriginUnavailableError)(
        f"{subject} can't be read ({why})"
    )


def _http_answer(error: BaseException) -> tuple[int | None, Mapping[str, str]]:
    """Return status and headers of the HTTP answer behind an error of botocore (which s3fs wraps),
    requests or aiohttp. The status is None if there is no answer."""
    found: Any = error.__cause__ if isinstance(error.__cause__, ClientError) else error
    if isinstance(found, ClientError):
        metadata: dict[str, Any] = found.response.get("ResponseMetadata", {})
        return metadata.get("HTTPStatusCode"), metadata.get("HTTPHeaders", {})
    answer = getattr(found, "response", None)  # only errors of requests have it
    source = found if answer is None else answer
    status = getattr(source, "status_code", getattr(source, "status", None))
    return status, getattr(source, "headers", None) or {}
