"""ListObjectsV2, one page per request.

Why not obstore: its listing fails as a whole on a key with an empty, `.` or `..` part, and its
listing by delimiter is not paged. Why not botocore's client: it takes 150 ms of CPU for a page
of 1,000 keys, where the server takes 20. So botocore signs and sends, and the page is parsed
here, in 10 ms.

Everything here blocks and is called in worker threads.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import unescape

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from cachefs.errors import BadDataError
from cachefs.origin import s3_errors
from cachefs.origin.names import is_key_name
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3_config import Credentials, S3Target
from cachefs.types import Entry, ObjectMeta

PAGE_KEYS = 1000
"""Keys asked for per page: the most that S3 gives."""

_TOKEN = re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")
_NS_PER_S = 1_000_000_000


def version_of(e_tag: str | None, mtime_ns: int, size_bytes: int) -> str:
    """The version of an object: its ETag, equal whether it came from LIST, HEAD or GET.

    Some servers quote it in headers and not in listings, so a bare one is quoted.
    """
    if not e_tag:
        return f"{mtime_ns}-{size_bytes}"
    return e_tag if e_tag.endswith('"') else f'"{e_tag}"'


@lru_cache(maxsize=4096)
def mtime_ns_of(last_modified: str) -> int:
    """ISO 8601 to ns, cut to whole seconds: HEAD knows no finer time, LIST sometimes does."""
    return int(datetime.fromisoformat(last_modified).timestamp()) * _NS_PER_S


class Page:
    """One page of a listing, parsed. `entries` are in key order, unresolved twins included;
    `keys` counts what was on the page, entries or not."""

    __slots__ = ("entries", "keys", "skipped")

    def __init__(self, entries: list[Entry], keys: int, skipped: int) -> None:
        self.entries = entries
        self.keys = keys
        self.skipped = skipped


class S3Lister:
    """Sends signed listing requests for one bucket."""

    def __init__(self, target: S3Target, credentials: Credentials, options: OriginOptions) -> None:
        self._target = target
        self._credentials = credentials
        self._http = URLLib3Session(
            verify=target.ca_file or True,
            proxies=get_environ_proxies(target.base_url),
            timeout=(options.connect_timeout_s, options.request_timeout_s),
            max_pool_connections=options.max_downloads,
        )

    def fetch(self, prefix: str, token: str | None, max_keys: int, delimiter: str) -> bytes:
        """The XML of one page. Raises `OriginError`."""
        query = {
            "continuation-token": token or "",
            "delimiter": delimiter,
            "encoding-type": "url",
            "list-type": "2",
            "max-keys": str(max_keys),
            "prefix": prefix,
        }
        # In sorted order and strictly quoted, so that what is sent is what is signed.
        text = "&".join(f"{k}={quote(v, safe='-_.~')}" for k, v in query.items() if v)
        request = AWSRequest("GET", f"{self._target.base_url}?{text}")
        frozen = self._credentials.current()
        if frozen is not None:
            S3SigV4Auth(frozen, "s3", self._target.region).add_auth(request)
        subject = f"s3://{self._target.bucket}/{prefix}"
        try:
            answer = self._http.send(request.prepare())
            body: bytes = answer.content
        except BotoCoreError:
            raise s3_errors.unreachable(self._target, subject) from None
        if answer.status_code != 200:
            code = s3_errors.error_code(body)
            region = answer.headers.get("x-amz-bucket-region")
            raise s3_errors.from_status(self._target, subject, answer.status_code, code, region)
        return body

    def close(self) -> None:
        """Drop idle connections."""
        self._http.close()


def next_token(body: bytes) -> str | None:
    """The continuation token, found without parsing: the next page is asked for first."""
    found = _TOKEN.search(body)
    return unescape(found[1].decode()) if found else None


def parse_page(body: bytes, prefix: str) -> Page:
    """The entries directly below `prefix`. Raises `BadDataError` for what is no listing."""
    try:
        root = ElementTree.fromstring(body)
        return _page(root, prefix)
    except (ElementTree.ParseError, ValueError, TypeError, AttributeError):
        raise BadDataError(f"the listing of {prefix or '/'} is not valid XML of S3") from None


def _page(root: ElementTree.Element, prefix: str) -> Page:
    namespace = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
    encoded = root.findtext(namespace + "EncodingType") == "url"
    found: list[tuple[str, Entry]] = []
    keys = skipped = 0
    for key, meta in _keys(root, namespace):
        keys += 1
        if encoded and ("%" in key or "+" in key):
            key = unquote_plus(key, errors="surrogateescape")
        name = key[len(prefix) :]
        if meta is None:
            name = name.removesuffix("/")
        elif not name:
            continue  # the marker of this very directory
        if not key.startswith(prefix) or not is_key_name(name):
            skipped += 1
        else:
            found.append((key, Entry(name, meta)))
    found.sort(key=_by_key)
    return Page([entry for _, entry in found], keys, skipped)


def _by_key(pair: tuple[str, Entry]) -> str:
    return pair[0]


def _keys(root: ElementTree.Element, ns: str) -> Iterator[tuple[str, ObjectMeta | None]]:
    key_tag, size_tag, etag_tag = ns + "Key", ns + "Size", ns + "ETag"
    time_tag = ns + "LastModified"
    for item in root.iterfind(ns + "Contents"):
        text: Any = item.findtext
        size, mtime_ns = int(text(size_tag)), mtime_ns_of(text(time_tag))
        yield text(key_tag), ObjectMeta(size, mtime_ns, version_of(text(etag_tag), mtime_ns, size))
    for item in root.iterfind(ns + "CommonPrefixes"):
        yield item.findtext(ns + "Prefix") or "", None
