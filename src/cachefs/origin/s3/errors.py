"""Maps errors of S3 and of the libraries to `cachefs.errors`.

Messages name the bucket or object and the endpoint, with the code and the sentence of the store.
They never include the libraries' own texts, which are long and may quote headers.
"""

import re
import socket
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from botocore.credentials import ReadOnlyCredentials

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    CredentialsError,
    NotFoundError,
    ObjectChangedError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
    UntrustedOriginError,
)
from cachefs.origin.proxies import proxy_for
from cachefs.origin.retry_after import parse_retry_after
from cachefs.origin.s3 import error_document
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.credentials import ENDED_CODES, WRONG_CODES, CredentialProvider
from cachefs.origin.s3.error_document import ErrorDocument
from cachefs.origin.status import is_definite
from cachefs.units import format_duration

CREDENTIAL_STATUSES = (400, 401, 403)
CREDENTIAL_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
TEMPORARY_CODES = {
    "ConditionalRequestConflict",
    "OperationAborted",
    "RequestTimeout",
    "IncompleteBody",
    "InternalError",
}
"""Codes of answers that a retry may change, although their status is definite."""
error_code = error_document.error_code
_KEY_ID_CODES = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationHeaderMalformed"}
_KEY_CODES = {"KMSNotConfigured", "KeyUnavailableException"}
_ARCHIVED = "InvalidObjectState"
_PROXY_REFUSES = 407
DOCUMENT_BYTES = 64 << 10
_BUSY_STATUS = (429, 503)
_SKEWED = "RequestTimeTooSkewed"
_MOST_SKEW_S = 900
"""S3 refuses requests signed by a clock that is wrong by more than this."""
_OTHER_HOST, _NOT_NOW = "it is for another host", "it is not valid at this time"
_UNKNOWN_CA = "its CA is unknown"
_OPENSSL_REASONS = {
    7: _UNKNOWN_CA,  # a CA of the same name is known
    9: _NOT_NOW,
    10: _NOT_NOW,
    18: _UNKNOWN_CA,
    19: _UNKNOWN_CA,
    20: _UNKNOWN_CA,
    21: _UNKNOWN_CA,
    62: _OTHER_HOST,
    64: _OTHER_HOST,
}
"""By the error numbers of X509_verify_cert_error_string(3)."""
_CERTIFICATE_ADVICE = {
    _OTHER_HOST: "write the host name of the certificate in the endpoint",
    _NOT_NOW: "renew it at the store, or set the clock of this machine",
}
_NO_TLS = "{} does not speak TLS: write http:// in the endpoint, or correct its port"
_OLD_TLS = "{} speaks only old versions of TLS: allow TLS 1.2 or 1.3 at the store"
_TLS_ADVICE = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
    "UNKNOWN_PROTOCOL": _NO_TLS,
    "UNSUPPORTED_PROTOCOL": _OLD_TLS,
    "TLSV1_ALERT_PROTOCOL_VERSION": _OLD_TLS,
    "NO_CERTIFICATES": "the file with the CAs for {} can't be read, or has none: correct it "
    "(--ca-file, or the variable SSL_CERT_FILE)",
}
"""By the reasons of OpenSSL, and of `origin/http/wire.py`."""
_REGION_CODES = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
"""Codes of answers that name the region of the bucket, as in botocore's `S3RegionRedirectorv2`."""
_REGION = re.compile(rb"<Region>([a-z0-9-]{1,63})</Region>")
_REGION_NAME = re.compile(r"[a-z0-9-]{1,63}")


def named_region(headers: Mapping[str, str], body: bytes) -> str | None:
    """Return the region of the bucket that a refusal names, in a header or in its body."""
    found = _REGION.search(body)
    name = headers.get("x-amz-bucket-region") or (found[1].decode() if found else "")
    return name if _REGION_NAME.fullmatch(name) else None


def concerns_region(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Whether an answer says that a request has gone to a wrong region, or is signed for it. The
    answer to a HEAD has no body; then the header says it."""
    if error_code(body) in _REGION_CODES:
        return True
    return status in (301, 400) and not body and "x-amz-bucket-region" in headers


def from_status(
    target: S3Target,
    subject: str,
    status: int,
    code: str,
    region: str | None = None,
    retry_after_s: float | None = None,
    server_time: str | None = None,
    verb: str = "read",
    body: bytes = b"",
    of_listing: bool = False,
) -> OriginError:
    """Return the exception for an answer that is no success. `subject` names the requested object;
    `server_time` is the header Date in an answer to a signed request; the message says that the
    object, or with `of_listing` the names that begin with it, can't be `verb`, and repeats what the
    document in `body` says."""
    ahead_s = _seconds_ahead(server_time)
    if code == _SKEWED or (status == 403 and abs(ahead_s or 0) > _MOST_SKEW_S):
        return _skewed(target, ahead_s)
    told = error_document.parsed(body)
    place = f"{subject} at {target.endpoint}"
    reason = f"HTTP {status} {code}".rstrip()
    if told.message:
        reason += f": {told.message}"
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return NotFoundError(f"bucket {target.bucket} does not exist at {target.endpoint}")
    if status in (301, 307) or code in _REGION_CODES:
        return _elsewhere(target, region or told.region, told.endpoint)
    if status == _PROXY_REFUSES:
        return OriginUnavailableError(
            f"{subject} can't be {verb}: the proxy refuses requests without a login ({reason}): "
            "write the user and the password in the address of the proxy"
        )
    if code == _ARCHIVED:
        what = f" ({told.storage_class})" if told.storage_class else ""
        return RefusedError(
            f"{place} can't be {verb}: it is archived{what}: restore it at the store first "
            f"({reason})"
        )
    if code.startswith("KMS.") or code in _KEY_CODES:
        return RefusedError(
            f"{place} can't be {verb}: its encryption key can't be used ({reason}): check the key "
            "in the key management service (KMS)"
        )
    if status in (401, 403) or code in CREDENTIAL_CODES:
        advice = _allow(target, told, verb, of_listing)
        denied = f"access denied to {place}"
        if verb != "read":
            denied = f"{place} can't be {verb}: access denied"
        return AccessDeniedError(f"{denied} ({reason}): {advice}")
    if status == 404:
        return NotFoundError(f"{place} does not exist")
    if status in (412, 416):
        return ObjectChangedError(f"{place} has changed since it was listed")
    if status in _BUSY_STATUS:
        return OriginBusyError(f"{place} can't be {verb} ({reason})", retry_after_s)
    if is_definite(status) and code not in TEMPORARY_CODES:
        return RefusedError(
            f"{place} can't be {verb}: the store refuses it ({reason}){_hint(status, told)}"
        )
    return OriginUnavailableError(f"{place} can't be {verb} ({reason})")


def _allow(target: S3Target, told: ErrorDocument, verb: str, of_listing: bool) -> str:
    """Return what would help against a denied access."""
    if told.code in CREDENTIAL_CODES or told.code in _KEY_ID_CODES:
        return "check the credentials"
    if told.permission:
        return f"allow {told.permission}"
    if verb != "read":
        return "check the credentials and what they allow"
    kind = target.scheme
    if of_listing:
        return f"check the credentials and whether they allow {kind}:ListBucket"
    return (
        f"check the credentials and whether they allow {kind}:GetObject, and kms:Decrypt if it is "
        "encrypted; give --requester-pays if its readers pay"
    )


def _hint(status: int, told: ErrorDocument) -> str:
    """Return the likely cause of a refusal, or nothing."""
    encrypted = "cachefs can't read objects that a customer's own key encrypts (SSE-C)"
    if status == 400 and "encrypt" in told.message.lower():
        return f": {encrypted}"
    # A HEAD has no body: of an object with a customer's key, S3 says only 400.
    if status == 400 and not told.code:
        return f": the store does not say why; {encrypted}, for example"
    return ""


def _elsewhere(target: S3Target, region: str, endpoint: str) -> RefusedError:
    """Return the error for a bucket of another region. The answer may name that and its address."""
    where = f"region {region}" if region else "another region"
    advice = "set it"
    if endpoint and not region:
        advice = f"the store names the endpoint {endpoint}"
    return RefusedError(
        f"bucket {target.bucket} is not in region {target.region} but in {where}: {advice}"
    )


def from_answer(
    target: S3Target,
    subject: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    is_signed: bool,
    of_listing: bool = False,
) -> OriginError:
    """Return the exception for an answer that is no success, to a request that is signed or not.
    `headers` finds the names in lower case."""
    region = named_region(headers, body)
    retry_after_s = parse_retry_after(headers.get("retry-after"))
    date = headers.get("date") if is_signed else None
    code = error_code(body)
    return from_status(
        target,
        subject,
        status,
        code,
        region,
        retry_after_s,
        date,
        body=body[:DOCUMENT_BYTES],
        of_listing=of_listing,
    )


def refused_credentials(
    target: S3Target,
    provider: CredentialProvider,
    used: ReadOnlyCredentials | None,
    subject: str,
    answer: tuple[int, Mapping[str, str], bytes],
    verb: str = "read",
) -> CredentialsError | None:
    """Return the exception for an answer that refuses credentials which have ended or have been
    replaced; None for another. It is no denial: the next ones may be valid."""
    status, _, body = answer
    code = error_code(body)
    if status not in CREDENTIAL_STATUSES or not provider.are_at_fault(used, code):
        return None
    return CredentialsError(
        f"{subject} can't be {verb}: {target.endpoint} does not accept the credentials "
        f"({f'HTTP {status} {code}'.rstrip()}), and there are no others: {provider.advice}"
    )


def may_have_old_credentials(method: str, status: int, body: bytes) -> bool:
    """Return whether an answer refuses credentials that have ended or been replaced. The answer to
    a HEAD has no body that says so, only a status that a denial does not have."""
    if status not in CREDENTIAL_STATUSES:
        return False
    code = error_code(body)
    return code in ENDED_CODES or code in WRONG_CODES or (method == "HEAD" and status == 400)


def can_sign_anew(
    provider: CredentialProvider,
    used: ReadOnlyCredentials | None,
    method: str,
    status: int,
    body: bytes,
) -> bool:
    """Return whether an answer refuses credentials as old, and there are others now. May block, see
    `CredentialProvider.has_newer`."""
    is_silent = method == "HEAD" and status in CREDENTIAL_STATUSES
    if may_have_old_credentials(method, status, body) or (
        is_silent and provider.are_at_fault(used, "")
    ):
        return provider.has_newer(used, error_code(body))
    return False


def _seconds_ahead(server_time: str | None) -> float | None:
    """Return how many seconds this machine's clock is ahead of the server's; negative if it is
    behind, None if unknown."""
    if not server_time:
        return None
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(server_time)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


def _skewed(target: S3Target, ahead_s: float | None) -> OriginUnavailableError:
    """Return the error for a wrong clock. It is not `AccessDeniedError`, so that cached names and
    blocks stay readable."""
    how = "not that"
    if ahead_s is not None and abs(ahead_s) >= 1:
        how = f"{format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} that"
    return OriginUnavailableError(
        f"{target.url} can't be read: the clock of this machine is {how} of {target.endpoint}, "
        "which therefore refuses what is signed here: set the clock"
    )


def from_connection(
    target: S3Target, subject: str, error: BaseException, verb: str = "read"
) -> OriginUnavailableError:
    """Return the exception for a connection that fails, breaks or times out, or whose certificate
    is refused. `error` is what `Wire.send` raised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _bad_certificate(target, subject, _openssl_reason(error))
    if isinstance(error, ssl.SSLError) and error.reason in _TLS_ADVICE:
        why = _TLS_ADVICE[error.reason].format(_tls_ends(target))
        return OriginUnavailableError(f"{subject} can't be {verb}: {why}")
    if isinstance(error, socket.gaierror):
        proxy = proxy_for(target.base_url)  # which looks up the host of the store itself
        host = target.endpoint if proxy is None else f"the proxy {proxy.address}"
        return OriginUnavailableError(
            f"{subject} can't be {verb}: the host of {host} is not known "
            f"({error.strerror}): check its name, and the DNS of this machine"
        )
    return unreachable(target, subject, verb)


def _openssl_reason(error: ssl.SSLCertVerificationError) -> str:
    return _OPENSSL_REASONS.get(error.verify_code, str(error.verify_message))


def _bad_certificate(target: S3Target, subject: str, why: str) -> UntrustedOriginError:
    """Return the error for a certificate that is refused because of `why`. Like `_skewed`, it is
    not `AccessDeniedError`."""
    advice = _CERTIFICATE_ADVICE.get(why, "give the PEM file of its CA with --ca-file")
    return UntrustedOriginError(
        f"{subject} can't be read: the certificate of {_tls_ends(target)} is refused ({why}): "
        f"{advice}"
    )


def _tls_ends(target: S3Target) -> str:
    """Return the names of what TLS is spoken with."""
    proxy = proxy_for(target.base_url)
    if proxy is None or not proxy.address.startswith("https://"):
        return target.endpoint
    return f"{target.endpoint} or its proxy {proxy.address}"


def web_page(target: S3Target) -> BadDataError:
    """Return the exception for a listing that is answered with a page for browsers. A gateway may
    do so for a while, so it is no `RefusedError`."""
    return BadDataError(
        f"{target.url} can't be read: {target.endpoint} answers with a web page, so it is no S3 "
        "endpoint: perhaps it is the port of the store's console, or a login page of the network"
    )


def unreachable(target: S3Target, subject: str, verb: str = "read") -> OriginUnavailableError:
    """Return the exception for a connection that fails, breaks or times out."""
    proxy = proxy_for(target.base_url)
    way = "" if proxy is None else f" through the proxy {proxy.address}"
    return OriginUnavailableError(
        f"{subject} can't be {verb}: {target.endpoint} does not answer{way}"
    )
