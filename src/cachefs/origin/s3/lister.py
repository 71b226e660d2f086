"""ListObjectsV2, one page per request.

botocore's client needs 150 ms of CPU for a page of 1,000 keys, while the server needs 20 ms. So
`listing.py` parses the page.
"""

import re
from typing import NamedTuple
from urllib.parse import quote

import trio

from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.bucket_reader import BucketReader
from cachefs.origin.s3.listing import PAGE_KEYS, keys_in

PAGE_BYTES = 16 << 20
"""A longer page is refused. 1,000 of the longest keys with all bytes quoted take 4 MiB."""
_SHORT_BYTES = 64 << 10
_WEB_PAGE = re.compile(rb"\s*<(?:!doctype\s+html|html)\b", re.IGNORECASE)
_MOST_AT_ONCE = 512
"""The most requests in flight."""


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
    """Sends the LISTs of one bucket."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader = reader
        self._at_once = 0

    async def has_key(self, key: str) -> bool:
        """Return whether a listing shows a key. A denied HEAD tells less: S3 denies it also for an
        absent key to those who may list only some prefixes. Raises `OriginError`."""
        page = await self.fetch(PageRequest(key, "/", max_keys=1))
        if len(page) <= _SHORT_BYTES:
            return key in keys_in(page)
        return key in await trio.to_thread.run_sync(keys_in, page)

    async def fetch(self, request: PageRequest, patience_s: float = 0.0) -> bytes:
        """Return the XML of one page, whose first byte may take `patience_s` longer than that of
        other answers. Raises `OriginError`."""
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
        if self._at_once >= _MOST_AT_ONCE:
            raise s3_errors.unreachable(self._reader.target, self._reader.target.url)
        self._at_once += 1
        try:
            answer = await self._reader.send(
                "GET", "", text, most_bytes=PAGE_BYTES, patience_s=patience_s
            )
        finally:
            self._at_once -= 1
        if _WEB_PAGE.match(answer.body):
            raise s3_errors.web_page(self._reader.target)
        return answer.body
