"""Sends requests that read from one bucket, signs them, and follows its redirects.

`BucketReader.send` blocks and must be called in a worker thread.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from botocore.credentials import ReadOnlyCredentials

from cachefs.errors import BadDataError, OriginError
from cachefs.log import warn_once
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3 import redirects
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.exchange import (
    Answer,
    Exchange,
    Exchanges,
    GivenUpError,
    Request,
    Sink,
    TooLongAnswerError,
)
from cachefs.origin.s3.fast_path.small_reader import address_of
from cachefs.origin.s3.fast_path.tls import TlsConnector
from cachefs.origin.s3.signing import NO_BODY, sign
from cachefs.origin.writable import BufferContent

log = logging.getLogger(__name__)

_NO_CONTENT = BufferContent(b"")
_ERROR_BYTES = 1 << 20
"""The longest body of an answer that is neither an object nor a listing."""
_MOST_PLACES = 8
"""The most hosts with kept connections. A bucket moves to one other host, if at all."""


class BucketReader:
    """Sends GETs and HEADs to one bucket. Thread-safe. It owns the connections; `_lock` protects
    `_places`."""

    def __init__(
        self,
        target: S3Target,
        provider: CredentialProvider,
        options: OriginOptions,
        tls: TlsConnector | None,
    ) -> None:
        self.target = target
        self.moved: S3Target | None = None
        """Where the bucket is, if an answer has shown that it is in another region."""
        self.accepts_gzip = target.unpacks
        """Whether GETs say that they accept gzip: see `objects.get`, which also sets it."""
        self._provider = provider
        self._options = options
        self._lock = threading.Lock()
        self._places = {
            target.base_url: Exchanges(target, options, tls, options.total_timeout_s),
        }

    def send(
        self,
        method: str,
        key: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        sink: Sink | None = None,
        exchange: Exchange | None = None,
        most_bytes: int = _ERROR_BYTES,
    ) -> Answer:
        """Return an answer with status 200 or 206. The body of an object goes to `sink`, if there
        is one. `exchange` can break the request off. `query` is quoted and sorted. Raises
        `OriginError`, also one that `sink` raises."""
        name = key or parse_qs(query).get("prefix", [""])[0]
        subject = f"{self.target.scheme}://{self.target.bucket}/{name}"
        wanted = _Wanted(method, key, query, headers or {}, most_bytes)
        provider = self._provider
        credentials = provider.current()
        answer, place = self._follow(wanted, subject, credentials, exchange, sink)
        if s3_errors.can_sign_anew(provider, credentials, method, answer.status, answer.body):
            credentials = provider.current()
            answer, place = self._follow(wanted, subject, credentials, exchange, sink)
        if answer.status in (200, 206):
            provider.note_success()
            if place.region != self.target.region:
                self.moved = place
            return answer
        refused = s3_errors.refused_credentials(self.target, provider, credentials, subject, answer)
        is_signed = credentials is not None
        raise refused or s3_errors.from_answer(
            self.target, subject, *answer, is_signed, of_listing=not key
        )

    def _follow(
        self,
        wanted: "_Wanted",
        subject: str,
        credentials: ReadOnlyCredentials | None,
        exchange: Exchange | None,
        sink: Sink | None,
    ) -> tuple[Answer, S3Target]:
        """Send a request and return the answer that is no redirect, and the place of it."""
        place = self.target
        for _ in range(redirects.MOST + 1):
            request = _request(place, credentials, wanted)
            answer = self._ask(place, subject, request, exchange or Exchange(), sink)
            moved = None
            if answer.status not in (200, 206):
                moved = self._moved(place, wanted.key, subject, answer)
            if moved is None:
                return answer, place
            place = moved
        raise OriginError(f"{subject} can't be read: {self.target.endpoint} redirects without end")

    def _moved(self, place: S3Target, key: str, subject: str, answer: Answer) -> S3Target | None:
        """Do `redirects.followed`; the first refusal of this bucket is logged."""
        try:
            return redirects.followed(place, key, subject, *answer)
        except OriginError as error:
            warn_once(log, self.target.base_url, "%s", error)
            raise

    def _ask(
        self, place: S3Target, subject: str, request: Request, exchange: Exchange, sink: Sink | None
    ) -> Answer:
        try:
            return self._exchanges(place).send(request, exchange, sink)
        except OriginError:
            raise
        except TooLongAnswerError:
            raise BadDataError(
                f"an answer of {self.target.endpoint} has more than {request.most_bytes >> 20} "
                "MiB, which no listing has"
            ) from None
        except GivenUpError:
            raise s3_errors.unreachable(self.target, subject) from None
        except Exception as error:  # its text is not shown: it may quote headers
            raise s3_errors.from_connection(self.target, subject, error) from None

    def _exchanges(self, place: S3Target) -> Exchanges:
        with self._lock:
            found = self._places.get(place.base_url)
            if found is None:
                if len(self._places) >= _MOST_PLACES:
                    raise OriginError(f"{place.endpoint} redirects requests to too many hosts")
                tls = None
                if place.base_url.startswith("https://"):
                    tls = TlsConnector(*address_of(place), place.ca_file)
                found = Exchanges(place, self._options, tls, self._options.total_timeout_s)
                self._places[place.base_url] = found
            return found

    def close(self) -> None:
        """Close idle connections now, and the others when they are given back."""
        with self._lock:
            for exchanges in self._places.values():
                exchanges.close()


class _Wanted(NamedTuple):
    """A request that is not signed yet."""

    method: str
    key: str
    query: str
    headers: Mapping[str, str]
    most_bytes: int


def _request(place: S3Target, credentials: ReadOnlyCredentials | None, wanted: _Wanted) -> Request:
    """Return the request, signed for `place`."""
    method, key, query, headers, most_bytes = wanted
    headers = {**headers, **dict(place.headers)}
    address = urlsplit(place.base_url)
    path = f"{address.path}/{quote(key, safe='/-_.~')}" if key else address.path or "/"
    if credentials is not None:
        host, now_s = address.netloc, time.time()
        headers = sign(
            credentials, place.region, method, host, path, query, headers, NO_BODY, now_s
        )
    return Request(method, path, query, dict(headers), _NO_CONTENT, most_bytes)
