"""Sends one write, and converts its failure to an `OriginError`."""

import hashlib
import re
import stat
from collections.abc import Mapping
from functools import partial

from botocore.credentials import ReadOnlyCredentials

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    ConflictError,
    NotFoundError,
    NotOfferedError,
    OriginError,
    OriginFullError,
    QuotaError,
    RefusedError,
    UploadLostError,
)
from cachefs.origin.base import OriginCounters
from cachefs.origin.http.wire import Answer, Bounds
from cachefs.origin.options import OriginOptions
from cachefs.origin.retry_after import parse_retry_after
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3 import redirects
from cachefs.origin.s3.bucket_reader import BucketReader, Wanted
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.lister import S3Lister
from cachefs.origin.s3.writing import messages
from cachefs.origin.writable import BufferContent, Content, WriteKind

_SHORT_BYTES = 64 << 10
"""Up to this size an answer is looked through on the loop."""
_NEED_MD5 = ("delete=",)
"""Queries of requests that S3 takes only with a Content-MD5."""
NO_CONTENT = BufferContent(b"")
_CONFLICTS = ("PreconditionFailed", "FileAlreadyExists", "ObjectAlreadyExists")
_LOST_UPLOADS = ("NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall")
"""The upload can't be completed. Its bytes must be sent anew."""
_DAMAGED = ("BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch")
_STATUS_OF = {
    "SlowDown": 503,
    "ServiceUnavailable": 503,
    "InternalError": 500,
    "AccessDenied": 403,
    "PreconditionFailed": 412,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
}
"""Statuses for errors inside an answer with status 200."""
_QUOTA = re.compile("quota|TooManyObjects", re.IGNORECASE)
_FULL = re.compile("StorageFull|Insufficient(Storage|Space)|StorageCapacity|DiskFull|NoSpace")
_RATE = re.compile("request|rate|throttl|bandwidth|traffic", re.IGNORECASE)
"""A quota of these is no quota of space: the request is sent again later."""
_STATUS_FULL, _STATUS_TOO_MANY = 507, 429
_NOT_OFFERED = ("NotImplemented", "MethodNotAllowed")
DIRECTORY = stat.S_IFDIR


def _kind_of(method: str, query: str, headers: Mapping[str, str]) -> WriteKind | None:
    """Return as what a request is counted; None for a HEAD, which is no write."""
    is_part = query.startswith("partNumber=")
    match method:
        case "HEAD":
            return None
        case "PUT" if "x-amz-copy-source" in headers:
            return "copies"
        case "PUT":
            return "parts" if is_part else "puts"
        case "DELETE" if not query:
            return "deletes"
        case "POST" if query.startswith("delete="):
            return "deletes"
        case _:
            return "uploads"


def _wants_checksum(status: int, code: str, body: bytes) -> bool:
    """Whether the answer may mean that the request lacks a Content-MD5. AWS says InvalidRequest,
    "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock
    parameters"."""
    if status != 400:
        return False
    text = body.lower()
    return code == "InvalidRequest" or b"md5" in text or b"checksum" in text


class ChecksumWantedError(RefusedError):
    """The store may take the request with a Content-MD5."""


def _fullness(place: str, status: int, code: str, reason: str) -> OriginFullError | None:
    """Return the exception if the store has no room, or allows no more. Codes of Ceph, versitygw,
    others (QuotaExceeded), MinIO (XMinioAdminBucketQuotaExceeded, XMinioStorageFull), Huawei OBS
    (InsufficientStorageSpace); 507 is that of WebDAV (RFC 4918)."""
    if status == _STATUS_TOO_MANY or _RATE.search(code):
        return None
    if _QUOTA.search(code):
        return QuotaError(
            f"{place} can't be written: a quota is reached ({reason}): delete something there"
        )
    if status == _STATUS_FULL or _FULL.search(code):
        return OriginFullError(
            f"{place} can't be written: the store is full ({reason}): delete something there"
        )
    return None


class Sender:
    """Sends requests to one bucket, through a `BucketReader` of its own."""

    def __init__(
        self,
        bucket: BucketReader,
        options: OriginOptions,
        counters: OriginCounters,
        lister: S3Lister,
    ) -> None:
        self._bucket = bucket
        self._credentials = bucket.credentials
        self._counters = counters
        self._lister = lister
        self.in_thread = bucket.in_thread
        self._bounds = Bounds(options.connect_timeout_s, options.idle_timeout_s)
        self._object_headers = messages.object_headers(options)
        self._sends_md5 = False

    @property
    def target(self) -> S3Target:
        """Where all requests are sent. Set it only on the loop."""
        return self._bucket.target

    @target.setter
    def target(self, target: S3Target) -> None:
        self._bucket.target = target

    async def send(
        self,
        method: str,
        key: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        content: Content = NO_CONTENT,
    ) -> Answer:
        """Send a request and return its answer with status 2xx. A cancelled request is broken off
        at once. Raises `OriginError`."""
        kind = _kind_of(method, query, headers or {})
        if kind is not None:
            self._counters.writes.count(kind)
        wanted = self._wanted(kind, method, key, query, headers or {}, content)
        try:
            try:
                answer = await self._ask(wanted)
            except ChecksumWantedError:
                if wanted.states_md5 or kind not in ("puts", "parts"):
                    raise
                answer = await self._ask_with_md5(wanted)
        except (ConflictError, NotFoundError):
            raise
        except OriginError:
            self._counters.errors += 1
            self._counters.writes.errors += 1
            raise
        if kind in ("puts", "parts"):
            self._counters.writes.sent_bytes += content.size_bytes
        return answer

    def _wanted(
        self,
        kind: WriteKind | None,
        method: str,
        key: str,
        query: str,
        headers: Mapping[str, str],
        content: Content,
    ) -> Wanted:
        has_body = content.size_bytes > 0 or method in ("PUT", "POST")
        return Wanted(
            method,
            key,
            query,
            self._stated(kind, query, headers),
            self._bounds,
            None,
            content=content if has_body else None,
            states_md5=query in _NEED_MD5 or (self._sends_md5 and kind in ("puts", "parts")),
            verb="written",
        )

    def _stated(
        self, kind: WriteKind | None, query: str, headers: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the headers of a request, and those with which this mount writes objects. A copy
        takes its tags over from its source."""
        if kind not in ("puts", "copies", "uploads") or query not in ("", "uploads="):
            return headers
        own = self._object_headers
        if kind == "copies":
            own = {name: value for name, value in own.items() if name != messages.TAGGING}
        return {**own, **headers}

    async def _ask(self, wanted: Wanted) -> Answer:
        asked = self.target
        answer, place, credentials = await self._bucket.answer(wanted)
        check = partial(self._checked, wanted, answer, credentials)
        is_short = len(answer.body) <= _SHORT_BYTES
        found = check() if is_short else await self.in_thread(check)
        if place is not asked:
            self.target = place
        return found

    async def _ask_with_md5(self, wanted: Wanted) -> Answer:
        """Send a request again, with Content-MD5, as all later ones with a body if it succeeds:
        buckets with Object Lock want it. It is not sent everywhere: an MD5 costs more than twice as
        much as the SHA-256 that the signature needs."""
        self._sends_md5 = True
        try:
            return await self._ask(wanted._replace(states_md5=True))
        except RefusedError:
            self._sends_md5 = False
            raise

    async def identity(self) -> str:
        """Return a digest of the store, of what each object gets, and of who writes, unless the
        credentials are temporary: those change all the time. Raises `OriginError`."""
        credentials = await self._credentials.current()
        who = "" if credentials is None or credentials.token else credentials.access_key
        stated = sorted(self._object_headers.items())
        target = self.target
        text = repr((target.base_url, target.bucket, target.prefix, stated, who))
        return hashlib.sha256(text.encode()).hexdigest()

    async def head(self, key: str) -> dict[str, str] | None:
        """Return the headers of an object by lower-case names, or None if there is none. Raises
        `OriginError`."""
        self._counters.heads += 1
        try:
            return (await self.send("HEAD", key)).headers
        except NotFoundError:
            return None
        except AccessDeniedError:
            try:
                is_there = await self._lister.has_key(key)
            except AccessDeniedError:
                is_there = True
            if is_there:
                raise
            return None

    def _checked(
        self, wanted: Wanted, answer: Answer, credentials: ReadOnlyCredentials | None
    ) -> Answer:
        """Return an answer that is a success. Raises `OriginError` for another."""
        provider, subject = self._credentials.provider, self._bucket.subject(wanted)
        status, headers, body = answer[:3]
        if 200 <= status < 300:
            if not messages.is_error(body):
                provider.note_success()
                return answer
            status = _STATUS_OF.get(s3_errors.error_code(body), 500)
        refused = s3_errors.refused_credentials(
            self.target, provider, credentials, subject, answer[:3], "written"
        )
        if refused is not None:
            raise refused
        raise self.failure(subject, status, headers, body, credentials is not None)

    def failure_of_code(self, subject: str, code: str) -> OriginError:
        """Return the exception for an error that an answer with status 200 names."""
        body = f"<Code>{code}</Code>".encode()
        return self.failure(subject, _STATUS_OF.get(code, 500), {}, body, False)

    def failure(
        self, subject: str, status: int, headers: Mapping[str, str], body: bytes, is_signed: bool
    ) -> OriginError:
        """Return the exception for an answer that is no success."""
        code = s3_errors.error_code(body)
        reason = f"HTTP {status} {code}".rstrip()
        place = f"{subject} at {self.target.endpoint}"
        if status == 412 or code in _CONFLICTS:
            return ConflictError(f"{place} has been changed, made or deleted meanwhile ({reason})")
        refused = redirects.refusal(self.target, subject, status, headers, body, "written")
        if refused is not None:
            return refused
        if (full := _fullness(place, status, code, reason)) is not None:
            return full
        if code in _LOST_UPLOADS:
            return UploadLostError(f"{place} has no such upload, or not all its parts ({reason})")
        if code in _DAMAGED:
            return BadDataError(f"{place} was not written: its bytes were damaged ({reason})")
        found = s3_errors.from_status(
            self.target,
            subject,
            status,
            code,
            headers.get("x-amz-bucket-region"),
            parse_retry_after(headers.get("retry-after")),
            headers.get("date") if is_signed else None,
            "written",
            body[: s3_errors.DOCUMENT_BYTES],
        )
        if type(found) is not RefusedError:
            return found
        if _wants_checksum(status, code, body):
            return ChecksumWantedError(str(found))
        if status in (405, 501) or code in _NOT_OFFERED:
            return NotOfferedError(str(found))
        return found
