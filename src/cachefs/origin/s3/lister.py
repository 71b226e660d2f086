"""ListObjectsV2, one page per request, and HEADs that return all headers.

Why not obstore: its whole listing fails on a key with an empty, `.` or `..` part, and its listing
with a delimiter is not paged. Why not botocore's client: it needs 150 ms of CPU for a page of 1,000
keys, while the server needs 20 ms. So botocore signs and sends, and `listing.py` parses the page.

All functions here block and must be called in worker threads.
"""

import threading
import time
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from cachefs.errors import BadDataError, OriginError
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.listing import PAGE_KEYS

PAGE_BYTES = 16 << 20
"""A longer page is refused. 1,000 of the longest keys with all bytes quoted take 4 MiB."""

_PIECE_BYTES = 64 << 10
_MOST_AT_ONCE = 512
"""The most requests in flight. A server that sends very slowly blocks a thread for a long time."""


class PageRequest(NamedTuple):
    """The parameters of one LIST."""

    prefix: str
    delimiter: str = ""
    token: str | None = None
    start_after: str = ""
    max_keys: int = PAGE_KEYS
    marker: str = ""
    """For a store that supports only the first version of ListObjects, and so neither `token` nor
    `start_after`."""


class S3Lister:
    """Sends signed requests to one bucket: listings, and HEADs that return all headers."""

    def __init__(
        self, target: S3Target, provider: CredentialProvider, options: OriginOptions
    ) -> None:
        self._target = target
        self._provider = provider
        # A proxy receives this URL unchanged, so it must have a path.
        self._url = target.base_url + ("" if urlsplit(target.base_url).path else "/")
        self._http = URLLib3Session(
            verify=target.ca_file or True,
            proxies=get_environ_proxies(target.base_url),
            timeout=(options.connect_timeout_s, options.idle_timeout_s),
            max_pool_connections=options.max_threads,
        )
        self._body_s = options.total_timeout_s
        self._turns = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def fetch(self, request: PageRequest) -> bytes:
        """Return the XML of one page. Raises `OriginError`."""
        query = {
            "continuation-token": request.token or "",
            "delimiter": request.delimiter,
            "encoding-type": "url",
            "list-type": "2",
            "marker": request.marker,
            "max-keys": str(request.max_keys),
            "prefix": request.prefix,
            "start-after": request.start_after,
        }
        # Sorted and strictly quoted, so that the text that is sent equals the signed text.
        text = "&".join(
            f"{k}={quote(v, '-_.~', errors='surrogateescape')}" for k, v in query.items() if v
        )
        return self._send("GET", f"{self._url}?{text}", request.prefix)[1]

    def head(self, key: str) -> dict[str, str]:
        """Return all headers of an object, by lower-case names. Raises `OriginError`."""
        url = f"{self._target.base_url}/{quote(key, safe='/-_.~')}"
        return self._send("HEAD", url, key)[0]

    def _send(self, method: str, url: str, key: str) -> tuple[dict[str, str], bytes]:
        request = AWSRequest(method, url, stream_output=True)
        frozen = self._provider.current()
        subject = f"{self._target.scheme}://{self._target.bucket}/{key}"
        if not self._turns.acquire(blocking=False):
            raise s3_errors.unreachable(self._target, subject)
        try:
            if frozen is not None:
                S3SigV4Auth(frozen, "s3", self._target.region).add_auth(request)
            answer = self._http.send(request.prepare())
            body = self._body(answer.raw)
        except OriginError:
            raise
        except Exception as error:  # its text is not shown: it may quote headers
            raise s3_errors.from_connection(self._target, subject, error) from None
        finally:
            self._turns.release()
        if answer.status_code != 200:
            raise s3_errors.from_answer(
                self._target,
                subject,
                answer.status_code,
                answer.headers,
                body,
                is_signed=frozen is not None,
            )
        return {name.lower(): value for name, value in answer.headers.items()}, body

    def _body(self, raw: Any) -> bytes:
        """Return the whole body. Raises `BadDataError` if it exceeds `PAGE_BYTES`, `TimeoutError`
        if it takes longer than `_body_s`. So a server that sends without end, or very slowly, can
        block neither memory nor a thread."""
        began_at = time.monotonic()
        body = bytearray()
        while piece := raw.read1(_PIECE_BYTES):
            body += piece
            if len(body) > PAGE_BYTES:
                raw.close()
                raise BadDataError(
                    f"an answer of {self._target.endpoint} has more than {PAGE_BYTES >> 20} MiB, "
                    "which no listing has"
                )
            if time.monotonic() - began_at > self._body_s:
                raw.close()
                raise TimeoutError
        raw.release_conn()
        return bytes(body)

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~", errors="surrogateescape")
