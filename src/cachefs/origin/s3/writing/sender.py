"""Signs and sends one write, a small one through the engine and others in worker threads, and
converts its failure to an `OriginError`."""

import hashlib
import re
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar
from urllib.parse import quote, urlsplit

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
from cachefs.origin.http import wire
from cachefs.origin.http.wire import Bounds, Wire
from cachefs.origin.options import OriginOptions
from cachefs.origin.retry_after import parse_retry_after
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3 import redirects
from cachefs.origin.s3.bucket_reader import route_to
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.exchange import Answer, Exchange, Exchanges, GivenUpError, Request
from cachefs.origin.s3.lister import S3Lister
from cachefs.origin.s3.loop_credentials import LoopCredentials
from cachefs.origin.s3.signing import sign
from cachefs.origin.s3.tls import TlsConnector, address_of
from cachefs.origin.s3.writing import messages
from cachefs.origin.writable import BufferContent, Content, WriteKind
from cachefs.workers import Workers

T = TypeVar("T")

MOST_BYTES = 256 << 10
"""The longest body of a request without a thread. A SHA-256 of it occupies the loop for .2 ms."""
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


def _is_small(method: str, query: str, content: Content) -> bool:
    """Whether a request and its answer are so small that no step of it occupies the loop for
    long."""
    is_short = method == "HEAD" or (method in ("PUT", "DELETE") and not query)
    return is_short and content.is_in_memory and content.size_bytes <= MOST_BYTES


class _MovedError(OriginError):
    """The store sends a request to another place of its own, `target`."""

    def __init__(self, message: str, target: S3Target) -> None:
        super().__init__(message)
        self.target = target


class Sender:
    """Sends requests to one bucket. It owns the connections and the threads for this."""

    def __init__(
        self,
        target: S3Target,
        engine: Wire,
        credentials: LoopCredentials,
        options: OriginOptions,
        tls: TlsConnector | None,
        counters: OriginCounters,
        lister: S3Lister,
    ) -> None:
        self.target = target
        self._wire = engine
        self._credentials = credentials
        self._provider = credentials.provider
        self._counters = counters
        self._options = options
        self._lister = lister
        self._workers: Workers | None = None
        self._exchanges = Exchanges(target, options, tls)
        self._route = route_to(target)
        self._bounds = Bounds(options.connect_timeout_s, options.idle_timeout_s)
        self._path = urlsplit(target.base_url).path
        self._object_headers = messages.object_headers(options)
        self._sends_md5 = False

    def move_to(self, target: S3Target, tls: TlsConnector | None) -> None:
        """Send all requests from now on to another place of the bucket. Only on the loop."""
        old = self._exchanges
        self.target = target
        self._exchanges = Exchanges(target, self._options, tls)
        self._route = route_to(target)
        self._path = urlsplit(target.base_url).path
        old.close()

    async def send(
        self,
        method: str,
        key: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        content: Content = NO_CONTENT,
    ) -> Answer:
        """Send a request and return its answer with status 2xx. The signature covers the SHA-256 of
        a body (without a signature, Content-MD5 its MD5), so that the store refuses damaged bytes.
        A cancelled request is broken off at once. Raises
        `OriginError`."""
        kind = _kind_of(method, query, headers or {})
        if kind is not None:
            self._counters.writes.count(kind)
        send = self._on_loop if _is_small(method, query, content) else self._by_thread
        asked = partial(self._send_within_store, send, method, key, query)
        stated = self._stated(kind, query, headers or {})
        has_md5 = self._sends_md5
        try:
            try:
                answer = await asked(dict(stated), content)
            except ChecksumWantedError:
                if has_md5 or kind not in ("puts", "parts"):
                    raise
                answer = await self._send_with_md5(asked, stated, content)
        except (ConflictError, NotFoundError):
            raise
        except OriginError:
            self._counters.writes.errors += 1
            raise
        if kind in ("puts", "parts"):
            self._counters.writes.sent_bytes += content.size_bytes
        return answer

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

    async def _send_within_store(
        self,
        send: Callable[..., Awaitable[Answer]],
        method: str,
        key: str,
        query: str,
        headers: dict[str, str],
        content: Content,
    ) -> Answer:
        """Send a request, and once more if the store redirects it within itself."""
        try:
            return await send(method, key, query, dict(headers), content)
        except _MovedError as moved:
            tls = None
            if moved.target.base_url.startswith("https://"):
                tls = TlsConnector(*address_of(moved.target), moved.target.ca_file)
            self.move_to(moved.target, tls)
            return await self._by_thread(method, key, query, headers, content)

    async def _send_with_md5(
        self, asked: Callable[..., Awaitable[Answer]], headers: Mapping[str, str], content: Content
    ) -> Answer:
        """Send a request again, with Content-MD5, as all later ones with a body if it succeeds:
        buckets with Object Lock want it. It is not sent everywhere: an MD5 costs more than twice as
        much as the SHA-256 that the signature needs."""
        self._sends_md5 = True
        try:
            return await asked(dict(headers), content)
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

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a blocking call, whose result is dropped if the caller is cancelled."""
        return await self._in_thread(work, lambda: None)

    async def _in_thread(self, work: Callable[[], T], give_up: Callable[[], None]) -> T:
        if self._workers is None:
            self._workers = Workers(self._options.max_threads, "origin-writer")
        try:
            return await self._workers.run_abandonable(work)
        except (ConflictError, NotFoundError, _MovedError):
            raise
        except OriginError:
            self._counters.errors += 1
            raise
        finally:
            give_up()

    async def _on_loop(
        self, method: str, key: str, query: str, headers: dict[str, str], content: Content
    ) -> Answer:
        subject = self._subject(key)
        try:
            credentials = await self._credentials.current()
            request = self._request(credentials, method, key, query, headers, content)
            answer = Answer(*(await self._wire.send(self._as_sent(request)))[:3])
        except OriginError:
            self._counters.errors += 1
            raise
        except Exception as error:  # its text is not shown: it may quote headers
            self._counters.errors += 1
            raise s3_errors.from_connection(self.target, subject, error, "written") from None
        if s3_errors.may_have_old_credentials(method, answer.status, answer.body):
            return await self._by_thread(method, key, query, headers, content)  # may wait for new
        try:
            return self._checked(subject, answer, credentials)
        except (ConflictError, NotFoundError, _MovedError):
            raise
        except OriginError:
            self._counters.errors += 1
            raise

    def _as_sent(self, request: Request) -> wire.Request:
        method, content = request.method, request.content
        url = f"{self._exchanges.base}{request.target}"
        headers = {"host": self._exchanges.host, **request.headers}
        body = None
        if content.size_bytes or method in ("PUT", "POST"):
            body = content.read(0, content.size_bytes)
        return wire.Request(method, url, headers, self._bounds, self._route, body)

    async def _by_thread(
        self, method: str, key: str, query: str, headers: dict[str, str], content: Content
    ) -> Answer:
        exchange = Exchange()
        work = partial(self._send, exchange, method, key, query, headers, content)
        return await self._in_thread(work, exchange.give_up)

    def _send(
        self,
        exchange: Exchange,
        method: str,
        key: str,
        query: str,
        headers: dict[str, str],
        content: Content,
    ) -> Answer:
        subject = self._subject(key)
        credentials = self._provider.current()

        def once() -> Answer:
            try:
                request = self._request(credentials, method, key, query, dict(headers), content)
                exchange.check()
                return self._exchanges.send(request, exchange)
            except GivenUpError:
                raise s3_errors.unreachable(self.target, subject, "written") from None
            except OriginError:
                raise
            except Exception as error:  # its text is not shown: it may quote headers
                raise s3_errors.from_connection(self.target, subject, error, "written") from None

        answer = once()
        provider = self._provider
        if s3_errors.can_sign_anew(provider, credentials, method, answer.status, answer.body):
            credentials = provider.current()
            answer = once()
        return self._checked(subject, answer, credentials)

    def _subject(self, key: str) -> str:
        return f"{self.target.scheme}://{self.target.bucket}/{key}"

    def _request(
        self,
        credentials: ReadOnlyCredentials | None,
        method: str,
        key: str,
        query: str,
        headers: dict[str, str],
        content: Content,
    ) -> Request:
        """Return the signed request. Reads the content, which may block."""
        headers |= self.target.headers
        path = self._path or "/"
        if key:
            path = f"{self._path}/{quote(key, safe='/-_.~')}"
        wants_md5 = content.size_bytes and (credentials is None or query in _NEED_MD5)
        is_body = method == "PUT" and "x-amz-copy-source" not in headers
        if wants_md5 or (is_body and self._sends_md5):
            headers["content-md5"] = messages.as_header(messages.md5_of(content))
        if credentials is not None:
            host, region = self._exchanges.host, self.target.region
            sha256 = messages.sha256_of(content)
            headers = sign(
                credentials, region, method, host, path, query, headers, sha256, time.time()
            )
        return Request(method, path, query, headers, content)

    def _checked(
        self, subject: str, answer: Answer, credentials: ReadOnlyCredentials | None
    ) -> Answer:
        """Return an answer that is a success. Raises `OriginError` for another."""
        status, body = answer.status, answer.body
        if 200 <= status < 300:
            if not messages.is_error(body):
                self._provider.note_success()
                return answer
            status = _STATUS_OF.get(s3_errors.error_code(body), 500)
        refused = s3_errors.refused_credentials(
            self.target, self._provider, credentials, subject, answer, "written"
        )
        if refused is not None:
            raise refused
        self._raise_if_moved(subject, answer)
        is_signed = credentials is not None
        raise self.failure(subject, status, answer.headers, body, is_signed)

    def _raise_if_moved(self, subject: str, answer: Answer) -> None:
        """Raise `_MovedError` for a redirect that is followed."""
        key = subject.removeprefix(self._subject(""))
        try:
            moved = redirects.followed(self.target, key, subject, *answer)
        except OriginError:
            return  # `failure` says the same of a write
        if moved is not None:
            text = f"{subject} can't be written: {self.target.endpoint} redirects without end"
            raise _MovedError(text, moved)

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

    def close(self) -> None:
        """Close idle connections, and end the threads after their requests."""
        self._exchanges.close()
        if self._workers is not None:
            self._workers.stop()
