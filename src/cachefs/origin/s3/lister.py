"""ListObjectsV2, one page per request.

botocore's client needs 150 ms of CPU for a page of 1,000 keys, while the server needs 20 ms. So
`listing.py` parses the page.
"""

import re
import threading
from typing import NamedTuple
from urllib.parse import quote

from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.bucket_reader import BucketReader
from cachefs.origin.s3.exchange import Exchange
from cachefs.origin.s3.listing import PAGE_KEYS, keys_in

PAGE_BYTES = 16 << 20
"""A longer page is refused. 1,000 of the longest keys with all bytes quoted take 4 MiB."""
_WEB_PAGE = re.compile(rb"\s*<(?:!doctype\s+html|html)\b", re.IGNORECASE)
_MOST_AT_ONCE = 512
"""The most requests in flight. Each occupies a thread until its answer is complete or too slow."""


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
    """Sends the LISTs of one bucket. `fetch` blocks and must be called in a worker thread."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader = reader
        self._turns = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def has_key(self, key: str, exchange: Exchange | None = None) -> bool:
        """Return whether a listing shows a key. Blocks as `fetch`. A denied HEAD tells less:
        S3 denies it also for an absent key to those who may list only some prefixes. Raises
        `OriginError`."""
        return key in keys_in(self.fetch(PageRequest(key, "/", max_keys=1), exchange))

    def fetch(self, request: PageRequest, exchange: Exchange | None = None) -> bytes:
        """Return the XML of one page. `exchange` can break the request off. Raises
        `OriginError`."""
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
        if not self._turns.acquire(blocking=False):
            raise s3_errors.unreachable(self._reader.target, self._reader.target.url)
        try:
            answer = self._reader.send("GET", "", text, exchange=exchange, most_bytes=PAGE_BYTES)
        finally:
            self._turns.release()
        if _WEB_PAGE.match(answer.body):
            raise s3_errors.web_page(self._reader.target)
        return answer.body
