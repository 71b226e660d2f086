"""Sends requests to one bucket, signs them, and follows its redirects."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from botocore.credentials import ReadOnlyCredentials

from cachefs.errors import BadDataError, OriginError, SpoolError
from cachefs.log import warn_once
from cachefs.origin.http._engine import Transfer
from cachefs.origin.http.system_cas import system_cas
from cachefs.origin.http.wire import (
    Answer,
    Bounds,
    Request,
    Route,
    Sink,
    TooLongAnswerError,
    Wire,
)
from cachefs.origin.options import QUICK_READ_S, OriginOptions
from cachefs.origin.proxies import proxy_for
from cachefs.origin.s3 import bodies, redirects
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.loop_credentials import LoopCredentials
from cachefs.origin.s3.signing import NO_BODY, sign, signed_headers
from cachefs.origin.writable import Content
from cachefs.types import Reply

T = TypeVar("T")

log = logging.getLogger(__name__)

_ERROR_BYTES = 1 << 20
"""The longest body of an answer that is neither an object nor a listing."""
_MOST_THREADS = 4
_MOST_PLACES = 8
"""The most hosts that are asked. A bucket moves to one other host, if at all."""


class Wanted(NamedTuple):
    """A request that is not signed yet."""

    method: str
    key: str
    query: str
    headers: Mapping[str, str]
    bounds: Bounds
    sink: Sink | None
    wants_md5: bool = False
    wants_room: bool = False
    """See `Wire.send`."""
    content: Content | None = None
    """The body of a write. The signature covers its SHA-256, so that the store refuses other
    bytes; without a signature, Content-MD5 its MD5."""
    states_md5: bool = False
    """Whether it has a Content-MD5 in any case."""
    verb: str = "read"
    """The end of the error message "... can't be read"."""


class BucketReader:
    """Sends requests to one bucket. Only the loop may use it."""

    def __init__(
        self, target: S3Target, wire: Wire, credentials: LoopCredentials, options: OriginOptions
    ) -> None:
        self.target = target
        self.moved: S3Target | None = None
        """Where the bucket is, if an answer has shown that it is in another region."""
        self.accepts_gzip = target.unpacks
        """Whether GETs say that they accept gzip: see `objects.get`, which also sets it."""
        self.credentials = credentials
        self._bounds = Bounds(
            options.connect_timeout_s, options.idle_timeout_s, options.total_timeout_s
        )
        self._quick_bounds = self._bounds._replace(total_s=QUICK_READ_S)
        self._wire = wire
        self._routes = {target.base_url: route_to(target)}

    async def send(
        self,
        method: str,
        key: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        sink: Sink | None = None,
        most_bytes: int = _ERROR_BYTES,
        wants_md5: bool = False,
        patience_s: float = 0.0,
    ) -> Answer:
        """Return an answer with status 200 or 206. The body of an object goes to `sink`, if there
        is one; `wants_md5` asks for its MD5. The first byte may take `patience_s` longer than that
        of other answers. `query` is quoted and sorted. Raises `OriginError`, also one that `sink`
        raises."""
        bounds = self._bounds._replace(most_bytes=most_bytes, patience_s=patience_s)
        wanted = Wanted(method, key, query, headers or {}, bounds, sink, wants_md5)
        answer, error = await self.ask(wanted)
        if error is not None:
            raise error
        return answer

    async def ask(self, wanted: Wanted) -> tuple[Answer, OriginError | None]:
        """Return an answer, and the error that it means; None for status 200 or 206. Raises
        `OriginError` if there is no answer."""
        answer, place, credentials = await self.answer(wanted)
        provider = self.credentials.provider
        if answer.status in (200, 206):
            provider.note_success()
            if place.region != self.target.region:
                self.moved = place
            return answer, None
        subject = self.subject(wanted)
        told = answer.status, answer.headers, answer.body
        refused = s3_errors.refused_credentials(self.target, provider, credentials, subject, told)
        is_signed = credentials is not None
        return answer, refused or s3_errors.from_answer(
            self.target, subject, *told, is_signed, of_listing=not wanted.key
        )

    def begin(
        self,
        key: str,
        headers: Mapping[str, str],
        sink: Sink,
        md5: bytes | None,
        on_ended: Callable[[Transfer], None],
        reply: Reply | None,
    ) -> bool:
        """Send a GET that takes little time: see `Wire.begin`. Follows no redirects, and looks for
        no new credentials. Return False, and send nothing, if it would have to wait or can't be
        sent."""
        provider = self.credentials.provider
        credentials = provider.at_hand()
        if credentials is None and not provider.anonymous:
            return False
        wanted = Wanted("GET", key, "", headers, self._quick_bounds, sink)
        request = _request(self.target, self._route(self.target), credentials, wanted)
        try:
            self._wire.begin(request, sink, md5, on_ended, reply)
        except (OSError, ValueError):
            return False
        return True

    async def answer(self, wanted: Wanted) -> tuple[Answer, S3Target, ReadOnlyCredentials | None]:
        """Return an answer that is no redirect within the store, the place of it, and with what the
        request was signed. It is signed anew if its credentials are refused and there are others.
        Raises `OriginError` if there is no answer."""
        credentials = await self.credentials.current()
        answer, place = await self._follow(wanted, credentials)
        asked = wanted.method, answer.status, answer.body
        if await self.credentials.can_sign_anew(credentials, *asked):
            credentials = await self.credentials.current()
            answer, place = await self._follow(wanted, credentials)
        return answer, place, credentials

    def subject(self, wanted: Wanted) -> str:
        """Return what a request is about, for messages."""
        name = wanted.key or parse_qs(wanted.query).get("prefix", [""])[0]
        return f"{self.target.scheme}://{self.target.bucket}/{name}"

    async def get_many(
        self,
        wanted: Iterator[tuple[int, Wanted]],
        at_a_time: int,
        on_ended: Callable[[int, Transfer], None],
    ) -> None:
        """Send GETs that have a sink: see `Wire.send_many`. Follows no redirects, and looks for no
        new credentials. Raises `OriginError`."""
        credentials = await self.credentials.current()
        place, route = self.target, self._route(self.target)

        def signed() -> Iterator[tuple[int, Request, Sink]]:
            for number, each in wanted:
                assert each.sink is not None
                yield number, _request(place, route, credentials, each), each.sink

        try:
            await self._wire.send_many(signed(), at_a_time, on_ended)
        except OriginError:
            raise
        except Exception as error:  # its text is not shown: it may quote headers
            raise s3_errors.from_connection(place, place.url, error) from None

    def get_wanted(self, key: str, headers: Mapping[str, str], most_bytes: int) -> Wanted:
        """Return a GET of at most `most_bytes`, with their MD5 and without a copy."""
        bounds = self._bounds._replace(most_bytes=most_bytes)
        return Wanted("GET", key, "", headers, bounds, None, True, True)

    def get_into(self, key: str, headers: Mapping[str, str], sink: Sink) -> Wanted:
        """Return a GET for `get_many`."""
        return Wanted("GET", key, "", headers, self._bounds, sink)

    async def _follow(
        self, wanted: Wanted, credentials: ReadOnlyCredentials | None
    ) -> tuple[Answer, S3Target]:
        """Send a request and return the answer that is no redirect, and the place of it."""
        place, subject = self.target, self.subject(wanted)
        for _ in range(redirects.MOST + 1):
            answer = await self._ask(place, subject, wanted, credentials)
            moved = None
            if answer.status >= 300:
                moved = self._moved(place, wanted, subject, answer)
            if moved is None:
                return answer, place
            place = moved
        raise OriginError(
            f"{subject} can't be {wanted.verb}: {self.target.endpoint} redirects without end"
        )

    def _moved(
        self, place: S3Target, wanted: Wanted, subject: str, answer: Answer
    ) -> S3Target | None:
        """Do `redirects.followed`; the first refusal of this bucket is logged."""
        try:
            told = answer.status, answer.headers, answer.body
            return redirects.followed(place, wanted.key, subject, *told, wanted.verb)
        except OriginError as error:
            warn_once(log, self.target.base_url, "%s", error)
            raise

    async def _ask(
        self,
        place: S3Target,
        subject: str,
        wanted: Wanted,
        credentials: ReadOnlyCredentials | None,
    ) -> Answer:
        try:
            sha256, md5 = NO_BODY, None
            if wanted.content is not None:
                sha256, md5 = await self._digests(wanted, wanted.content, credentials is not None)
            request = _request(place, self._route(place), credentials, wanted, sha256, md5)
            return await self._wire.send(request, wanted.sink, wanted.wants_md5, wanted.wants_room)
        except (OriginError, SpoolError):  # the second of what reads the body
            raise
        except TooLongAnswerError:
            raise BadDataError(
                f"an answer of {self.target.endpoint} has more than "
                f"{wanted.bounds.most_bytes >> 20} MiB, which no right one has"
            ) from None
        except Exception as error:  # its text is not shown: it may quote headers
            raise s3_errors.from_connection(self.target, subject, error, wanted.verb) from None

    async def _digests(
        self, wanted: Wanted, content: Content, is_signed: bool
    ) -> tuple[str, bytes | None]:
        """Return the SHA-256 and the MD5 that a request with a body needs."""
        states_md5 = wanted.states_md5 or (content.size_bytes > 0 and not is_signed)
        digests = partial(bodies.digests, content, is_signed, states_md5)
        if bodies.is_short(content):
            return digests()
        return await self.in_thread(digests)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a blocking call, whose result is dropped if the caller is cancelled."""
        return await self._wire.workers.run_abandonable(work)

    def _route(self, place: S3Target) -> Route:
        found = self._routes.get(place.base_url)
        if found is None:
            if len(self._routes) >= _MOST_PLACES:
                raise OriginError(f"{place.endpoint} redirects requests to too many hosts")
            found = self._routes[place.base_url] = route_to(place)
        return found


def threads() -> int:
    """Return how many threads send requests. One moves 1 GB/s and sends 8,000 requests a second."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


def route_to(place: S3Target) -> Route:
    """Return how the host of `place` is reached."""
    proxy = proxy_for(place.base_url)
    ca_file, ca_path = (place.ca_file, None) if place.ca_file else system_cas()
    return Route(proxy.url if proxy is not None else None, ca_file, ca_path)


def _request(
    place: S3Target,
    route: Route,
    credentials: ReadOnlyCredentials | None,
    wanted: Wanted,
    sha256: str = NO_BODY,
    md5: bytes | None = None,
) -> Request:
    """Return the request, signed for `place`."""
    method, key, query = wanted.method, wanted.key, wanted.query
    headers: Mapping[str, str] = {**wanted.headers, **dict(place.headers)}
    if md5 is not None:
        headers = {**headers, "content-md5": bodies.as_header(md5)}
    address = urlsplit(place.base_url)
    path = f"{address.path}/{quote(key, safe='/-_.~')}" if key else address.path or "/"
    host = address.netloc
    if credentials is None:
        pass
    elif method == "GET" and not query:
        now_s = time.time()
        signed = signed_headers(credentials, place.region, host, path, now_s, place.headers)
        headers = {**wanted.headers, **signed}
    else:
        headers = sign(
            credentials, place.region, method, host, path, query, headers, sha256, time.time()
        )
    url = f"{address.scheme}://{host}{path}"
    # With the port, if the address has one: the signature covers it.
    headers = {"host": host, **headers}
    body = None if wanted.content is None else bodies.sent_as(wanted.content)
    return Request(method, f"{url}?{query}" if query else url, headers, wanted.bounds, route, body)
