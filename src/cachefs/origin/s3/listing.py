"""Parses the pages of listings (`lister.py` says why no library does it), in 5 ms for 1,000 keys.

Large pages must be parsed in worker threads.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_plus

from cachefs.errors import BadDataError
from cachefs.foreign_numbers import whole_number
from cachefs.origin.names import is_key_name
from cachefs.origin.s3 import answer_xml
from cachefs.types import Entry, ObjectMeta

PAGE_KEYS = 1000
"""Keys requested per page: the maximum of S3."""
_MOST_ROWS = 100_000
"""The most rows of a page. Some stores return more keys than requested."""
_TAGS_PER_ROW = 40
MOST_KEY_BYTES = 1024
"""S3 has no longer keys."""
_DIRECTORY_BYTES = 400
"""The memory of one directory of a page, beside its path."""
_MOST_DIRECTORY_BYTES = 1 << 20
_DIRECTORY_BYTES_PER_BYTE = 4
"""The memory that all directories of a page may take: `_MOST_DIRECTORY_BYTES`, or for each byte of
the page so many. 1,000 keys of 300 bytes, each in three directories of its own, take that."""
_MOST_TIME_CHARACTERS = 40
_TOKEN = re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")
_MARKER = re.compile(rb"<NextMarker>([^<]+)</NextMarker>")
_TRUNCATED = re.compile(rb"<IsTruncated>\s*(true|false)\s*</IsTruncated>")
_ROW_TAGS = ("Key", "Size", "LastModified", "ETag")
_ROW_PATTERNS = [re.compile(f"<{tag}>([^<]*)</{tag}>") for tag in _ROW_TAGS]
_PREFIX = re.compile(r"<CommonPrefixes>\s*<Prefix>([^<]*)</Prefix>\s*</CommonPrefixes>")
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_REFERENCE = re.compile("&(#[0-9]{1,7}|#x[0-9A-Fa-f]{1,6}|amp|lt|gt|quot|apos);")
_ROOTS = ("ListBucketResult", "ListObjectResult")
"""The name of a listing: of S3, and of AIStore (github.com/NVIDIA/aistore/issues/201)."""
_ENDS = tuple(f"</{root}>" for root in _ROOTS)
_ENCODED = "<EncodingType>url</EncodingType>"
_NS_PER_S = 1_000_000_000
_MOST_SECONDS = (1 << 63) // _NS_PER_S
MOST_BYTES = 1 << 62
"""An upper bound for the size of any object."""
_E_TAG_CHARACTERS = 1024


def version_of(e_tag: str | None, mtime_ns: int, size_bytes: int) -> str:
    """Return the version of an object: its ETag, in the same form for LIST, HEAD and GET.

    Some servers quote the ETag in headers but not in listings, so an unquoted one is quoted here.
    Without an ETag, the version consists of time and size.
    """
    if not e_tag:
        return f"{mtime_ns}-{size_bytes}"
    return e_tag if e_tag.endswith('"') else f'"{e_tag}"'


@lru_cache(maxsize=4096)
def mtime_ns_of(last_modified: str) -> int:
    """Convert ISO 8601 to ns, rounded as by `whole_seconds`. Without a zone it is UTC. Raises
    `ValueError`, `OverflowError`."""
    told = datetime.fromisoformat(last_modified)
    return whole_seconds(told if told.tzinfo else told.replace(tzinfo=UTC))


def whole_seconds(modified: datetime) -> int:
    """Return the time in ns, cut to whole seconds, because HEAD has no finer times but some LISTs
    do. A time that a file can't have (such as after the year 2262) becomes the nearest that it can
    have."""
    seconds = int(modified.timestamp())
    return max(-_MOST_SECONDS, min(seconds, _MOST_SECONDS)) * _NS_PER_S


def mtime_ns_in(header: str) -> int | None:
    """Return the time of a Last-Modified in ns, as `whole_seconds`; None if it is no time."""
    try:
        return whole_seconds(parsedate_to_datetime(header[:_MOST_TIME_CHARACTERS]))
    except (ValueError, OverflowError):
        return None


class Page(NamedTuple):
    """One parsed page of a listing."""

    entries: list[Entry]
    """In key order, with unresolved twins."""
    keys: int = 0
    """The number of all keys and prefixes of the page, including unshown ones."""
    unshown: int = 0
    last_key: str = ""
    """The last of all keys and prefixes, or ""."""
    example: str = ""
    """One of the unshown keys."""
    lacks_e_tags: bool = False
    """A shown object that is not empty has no ETag."""


class Tree(NamedTuple):
    """A page of a listing without a delimiter, split into one page for each directory."""

    pages: dict[str, Page]
    """By directory path below the prefix; `""` is the prefix itself."""
    last_key: str
    is_whole: bool
    """No further page follows."""
    is_in_order: bool
    """All keys below a directory are adjacent. So if a page follows, all directories are complete
    except those that contain the last key. S3 Express buckets have no order."""


def next_token(body: bytes) -> str | None:
    """Return the continuation token, or None on the last page. This does not parse the page, so
    that the next page can be requested before parsing."""
    found = _TOKEN.search(body)
    if found is None or _says_truncated(body) is False:
        return None
    with _no_listing(""):
        return _unescape(found[1].decode())


def next_marker(body: bytes, page_end: str) -> str | None:
    """Return the marker after which the listing continues, for a truncated page without a token, as
    the first version of ListObjects sends it; None otherwise. `page_end` is the last key of the
    page. Raises `BadDataError` if the page has no place to continue from."""
    if next_token(body) is not None or not _says_truncated(body):
        return None
    found = _MARKER.search(body)
    with _no_listing(""):
        marker = _unescape(found[1].decode()) if found else page_end
    if found and _ENCODED.encode() in body:
        marker = _decoded(marker)
    if not marker:
        raise BadDataError("a listing says that more follows, and not from where on")
    return marker


def _says_truncated(body: bytes) -> bool | None:
    found = _TRUNCATED.search(body)
    return found and found[1] == b"true"


def parse_page(body: bytes, prefix: str) -> Page:
    """Return the entries directly below `prefix`. Raises `BadDataError` if `body` is no listing."""
    with _no_listing(prefix):
        return _page(_columns_of(body), prefix)


def keys_in(body: bytes) -> set[str]:
    """Return all keys of a page. Raises `BadDataError`."""
    with _no_listing(""):
        columns = _columns_of(body)
        return {_decoded(key) if columns.encoded else key for key in columns.keys}


def parse_tree(body: bytes, prefix: str) -> Tree:
    """Parse a page that was requested without a delimiter. If its directories would need too much
    memory, return a tree that shows none of them. Raises `BadDataError`."""
    with _no_listing(prefix):
        columns = _columns_of(body)
        keys = columns.keys
        if columns.encoded:
            keys = [_decoded(key) if "%" in key or "+" in key else key for key in keys]
        rows = _rows_by_directory(keys, prefix)
        by_path = _directories_in(
            rows, max(_MOST_DIRECTORY_BYTES, _DIRECTORY_BYTES_PER_BYTE * len(body))
        )
        if by_path is None:
            return Tree({}, "", is_whole=False, is_in_order=False)
        pages = {}
        for path, directories in by_path.items():
            start = f"{prefix}{path}/" if path else prefix
            mine = rows.get(path, [])
            part = _Columns(
                [keys[row] for row in mine],
                [columns.sizes[row] for row in mine],
                [columns.times[row] for row in mine],
                [columns.e_tags[row] for row in mine],
                [f"{start}{name}/" for name in directories],
                encoded=False,
            )
            pages[path] = _page(part, start)
        is_whole = next_token(body) is None and not _says_truncated(body)
        return Tree(pages, keys[-1] if keys else "", is_whole, _is_in_order(keys))


def _is_in_order(keys: list[str]) -> bool:
    """Whether keys are sorted by their bytes, as in S3, or part by part, as in a file system
    (SeaweedFS)."""
    in_bytes, by_part = keys, [key.replace("/", "\0") for key in keys]
    return in_bytes == sorted(in_bytes) or by_part == sorted(by_part)


def _rows_by_directory(keys: list[str], prefix: str) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    start = len(prefix)
    for row, key in enumerate(keys):
        if not key.startswith(prefix):
            raise ValueError(key)
        if len(key) > MOST_KEY_BYTES:  # it is no key of S3: `_page` skips it
            rows.setdefault("", []).append(row)
            continue
        path = key[start:].rpartition("/")[0]
        # Keys below an empty part can't be shown. They go to the directory above that part, where
        # `_page` skips them.
        unfit = f"/{path}/".find("//")
        rows.setdefault(path[: max(0, unfit - 1)] if unfit >= 0 and path else path, []).append(row)
    return rows


def _directories_in(paths: Iterable[str], most_bytes: int) -> dict[str, list[str]] | None:
    """Return `paths` and all directories above them, each with the names of its directories. None
    if they need more memory than `most_bytes`: a deep path makes as many as it has parts."""
    left = most_bytes
    names: dict[str, list[str]] = {"": []}
    found: list[tuple[str, str]] = []
    for leaf in paths:
        path = leaf
        while path not in names:
            names[path] = []
            left -= len(path) + _DIRECTORY_BYTES
            if left < 0:
                return None
            above, _, name = path.rpartition("/")
            found.append((above, name))
            path = above
    for above, name in found:
        names[above].append(name)
    return names


@contextmanager
def _no_listing(prefix: str) -> Iterator[None]:
    try:
        yield
    except (
        BadDataError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        LookupError,  # an unknown encoding
    ):
        raise BadDataError(f"the listing of {prefix or '/'} is not valid XML of S3") from None


def _columns_of(body: bytes) -> "_Columns":
    rows = body.count(b"<Contents") + body.count(b"<CommonPrefixes")
    most_tags = _TAGS_PER_ROW * (rows + PAGE_KEYS)
    if rows > _MOST_ROWS or body.count(b"<") > most_tags:
        raise ValueError(rows)
    return _columns_fast(body) or _columns(body, most_tags)


class _Columns(NamedTuple):
    """A page as columns. The first four have one element for each row."""

    keys: list[str]
    sizes: list[str]
    times: list[str]
    e_tags: list[str]
    prefixes: list[str]
    encoded: bool


def _columns_fast(body: bytes) -> _Columns | None:
    """Cut the columns out of a page that is written in the usual way; return None for others.

    All servers write these elements without attributes and namespace prefixes, each once per
    object; the counts verify this. It is five times as fast as the XML parser and halves the cost
    of listing a large directory.
    """
    # A key that is no UTF-8 gets surrogates, which `is_key_name` refuses.
    text = (
        body.decode(errors="surrogateescape").replace("&#34;", '"').replace("&quot;", '"')
    )  # every ETag has these
    if not text.rstrip().endswith(_ENDS) or "<!" in text:
        return None
    rows = text.count("<Contents")
    columns = [pattern.findall(text) for pattern in _ROW_PATTERNS]
    if "<ETag" not in text:
        columns[3] = [""] * rows
    prefixes: list[str] = _PREFIX.findall(text)
    if any(len(column) != rows for column in columns):
        return None
    if len(prefixes) != text.count("<CommonPrefixes"):
        return None
    keys, sizes, times, e_tags = columns
    if "&" in text:
        keys, e_tags, prefixes = (_unescaped(column) for column in (keys, e_tags, prefixes))
    return _Columns(keys, sizes, times, e_tags, prefixes, _ENCODED in text)


def _unescape(text: str) -> str:
    """Replace references to characters, as XML defines them. (`html.unescape` drops those to
    control characters, so two keys would become one.) Others stay as they are."""
    return _REFERENCE.sub(_referenced, text) if "&" in text else text


def _referenced(found: re.Match[str]) -> str:
    name = found[1]
    if name[0] != "#":
        return _ENTITIES[name]
    base = 16 if name[1] == "x" else 10
    number = int(name.lstrip("#x"), base)
    is_character = number <= sys.maxunicode and not 0xD800 <= number < 0xE000
    return chr(number) if is_character else found[0]


def _unescaped(column: list[str]) -> list[str]:
    return [_unescape(text) for text in column]


def _columns(body: bytes, most_tags: int) -> _Columns:
    """Do the same with the XML parser, for pages that are written in another way."""
    columns = _Columns([], [], [], [], [], encoded=False)
    of_rows = (columns.keys, columns.sizes, columns.times, columns.e_tags)

    def take_row(name: str, texts: dict[str, str]) -> None:
        if name == "Contents":
            for column, tag in zip(of_rows, _ROW_TAGS, strict=True):
                column.append(texts.get(tag, ""))
        elif name == "CommonPrefixes":
            columns.prefixes.append(texts.get("Prefix", ""))

    document = answer_xml.parse(body, take_row, most_tags)
    if document.root not in _ROOTS:
        raise ValueError(document.root)
    return columns._replace(encoded=document.texts.get("EncodingType") == "url")


def _page(columns: _Columns, prefix: str) -> Page:
    found: list[tuple[str, Entry]] = []
    unshown = 0
    example = ""
    lacks_e_tags = False
    start = len(prefix)
    metas = zip(columns.sizes, columns.times, columns.e_tags, strict=True)
    for key, (size_text, time_text, e_tag) in zip(columns.keys, metas, strict=True):
        if columns.encoded and ("%" in key or "+" in key):
            key = _decoded(key)
        if key == prefix:  # the marker of this directory itself
            if whole_number(size_text):
                unshown += 1  # nobody can read what is in it
                example = key
            continue
        name = key[start:]
        if not key.startswith(prefix) or not is_key_name(name):
            unshown += 1
            example = key
            continue
        size = whole_number(size_text)
        mtime_ns = _mtime_ns(time_text) if time_text or not e_tag else 0
        is_odd = len(e_tag) > _E_TAG_CHARACTERS
        if size is None or size > MOST_BYTES or mtime_ns is None or is_odd:
            unshown += 1
            example = key
            continue
        meta = ObjectMeta(size, mtime_ns, version_of(e_tag, mtime_ns, size))
        lacks_e_tags = lacks_e_tags or (not e_tag and size > 0)
        found.append((key, Entry(name, meta)))
    for key in columns.prefixes:
        if columns.encoded:
            key = _decoded(key)
        name = key[start:].removesuffix("/")
        if key.startswith(prefix) and is_key_name(name):
            found.append((key, Entry(name, None)))
        else:
            unshown += 1
            example = key
    if columns.prefixes:
        found.sort(key=_by_key)
    keys = len(columns.keys) + len(columns.prefixes)
    last_key = max([*columns.keys[-1:], *columns.prefixes[-1:]], default="")
    if columns.encoded:
        last_key = _decoded(last_key)
    entries = [entry for _, entry in found]
    return Page(entries, keys, unshown, last_key, example, lacks_e_tags)


def _mtime_ns(text: str) -> int | None:
    """Return `mtime_ns_of`, or None if `text` is no time."""
    if len(text) > _MOST_TIME_CHARACTERS:
        return None
    try:
        return mtime_ns_of(text)
    except (ValueError, OverflowError):
        return None


def _decoded(key: str) -> str:
    return unquote_plus(key, errors="surrogateescape")


def _by_key(pair: tuple[str, Entry]) -> str:
    return pair[0]
