"""What S3 and the libraries say, in words of `cachefs.errors`.

Messages name the bucket and the endpoint. The libraries' own texts are never passed on: they
are long, and may quote headers.
"""

import re

from cachefs.errors import (
    AccessDeniedError,
    NotFoundError,
    ObjectChangedError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.origin.s3_config import S3Target

_CODE = re.compile(rb"<Code>([A-Za-z]{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_OBSTORE_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_CREDENTIAL_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_BUSY_STATUS = (429, 503)
_REGION_CODES = {"PermanentRedirect", "AuthorizationHeaderMalformed"}


def error_code(body: bytes) -> str:
    """The code in an S3 error document, or an empty string."""
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def from_status(
    target: S3Target,
    subject: str,
    status: int,
    code: str,
    region: str | None = None,
    retry_after_s: float | None = None,
) -> OriginError:
    """The exception for an answer that is not a success. `subject` is what was asked for."""
    place = f"{subject} at {target.endpoint}"
    reason = f"HTTP {status} {code}".rstrip()
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return NotFoundError(f"bucket {target.bucket} does not exist at {target.endpoint}")
    if status in (301, 307) or code in _REGION_CODES:
        where = f"region {region}" if region else "another region"
        return OriginUnavailableError(
            f"bucket {target.bucket} is not in region {target.region} but in {where}: set it"
        )
    if status in (401, 403) or code in _CREDENTIAL_CODES:
        return AccessDeniedError(f"access denied to {place} ({reason}): check the credentials")
    if status == 404:
        return NotFoundError(f"{place} does not exist")
    if status in (412, 416):
        return ObjectChangedError(f"{place} has changed since it was listed")
    if status in _BUSY_STATUS:
        return OriginBusyError(f"{place} can't be read ({reason})", retry_after_s)
    return OriginUnavailableError(f"{place} can't be read ({reason})")


def from_obstore(target: S3Target, subject: str, error: Exception) -> OriginError:
    """The exception for an error of obstore, told apart by class, then by HTTP status."""
    kind = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return from_status(target, subject, 404, "")
    text = str(error)
    code = _OBSTORE_CODE.search(text)
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return from_status(target, subject, 403, code[1] if code else "")
    if kind == "PreconditionError":
        return from_status(target, subject, 412, "")
    status = _STATUS.search(text)
    if status:
        return from_status(target, subject, int(status[1]), code[1] if code else "")
    return unreachable(target, subject)


def unreachable(target: S3Target, subject: str) -> OriginUnavailableError:
    """For a connection that fails, breaks or times out."""
    return OriginUnavailableError(f"{subject} can't be read: {target.endpoint} does not answer")
