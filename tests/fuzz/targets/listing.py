"""LIST answers, page after page (origin/s3/pages.py, listing.py)."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import trio

from cachefs.errors import NotFoundError, OriginError, OriginUnavailableError
from cachefs.format.inode_record import KIND_FILE, pack_inode_of
from cachefs.origin.base import Learned, OriginCounters
from cachefs.origin.names import is_key_name
from cachefs.origin.s3.lister import PageRequest
from cachefs.origin.s3.listing import next_marker, next_token, parse_page, parse_tree
from cachefs.origin.s3.pages import PagedListing, TreeShapes
from cachefs.origin.s3.versions import Versions
from cachefs.types import Entry, ObjectMeta
from tests.fuzz.targets._support import parts

_MOST_REQUESTS = 40
_ROW = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag>"
    "<Size>1</Size></Contents>"
)


def _listed(keys: Iterable[str]) -> bytes:
    rows = "".join(map(_ROW.format, keys))
    return f"<ListBucketResult>{rows}</ListBucketResult>".encode()


GROWING = {
    "one key": lambda count: _listed(["a/" * (count // 2) + "x"]),
    "long keys": lambda count: _listed(f"{n}/" + "a/" * 500 for n in range(count // 1024)),
    "rows": lambda count: _listed(map(str, range(count // 120))),
    "deep keys": lambda count: _listed(f"{n}/a/b" for n in range(count // 120)),
    "rows of another form": lambda count: _listed(map(str, range(count // 120))).replace(
        b"<Key>", b"<Key a='1'>"
    ),
    "short tags": lambda count: (
        b"<ListBucketResult>" + (b"<Contents>" + b"<a/>" * 17 + b"</Contents>") * (count // 89)
    ),
    "rows without a text": lambda count: (
        b"<ListBucketResult>" + b"<Contents/>" * (count // 11) + b"</ListBucketResult>"
    ),
    "white space": lambda count: b"<IsTruncated>" + b" " * count,
    "open tags": lambda count: b"<CommonPrefixes> <Prefix>" * (count // 25),
    "open tokens": lambda count: b"<NextContinuationToken>a" * (count // 24),
}
"""Inputs of about so many bytes."""


class _Source:
    """Has some pages, and fails afterwards."""

    def __init__(self, pages: list[bytes]) -> None:
        self.shapes = TreeShapes()
        self.counters = OriginCounters()
        self.versions = Versions("http://store", Learned())
        self._pages = pages
        self.asked = 0

    def dir_prefix(self, path: str) -> str:
        return f"{path}/" if path else ""

    def start_page(self, request: PageRequest) -> int:
        self.asked += 1
        return self.asked - 1

    async def fetch_page(self, started: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if started >= len(self._pages):
            raise OriginUnavailableError("no more pages")
        return self._pages[started]

    async def no_such_dir(self, path: str) -> OriginError:
        return NotFoundError(path)


async def _list(data: bytes) -> None:
    for path, below in (("", None), ("", {}), ("d", {})):
        found: dict[str, list[Entry]] | None = below
        source = _Source(parts(data))
        listing = PagedListing(source, path, found)  # type: ignore[arg-type]
        entries: list[Entry] = []
        try:
            while (page := await listing.next_page()) is not None:
                entries += page
        except OriginError:
            pass
        assert source.asked <= _MOST_REQUESTS
        for entry in entries:
            _check(entry)
        for names in (found or {}).values():
            for entry in names:
                _check(entry)


def _check(entry: Entry) -> None:
    assert is_key_name(entry.name)
    if isinstance(entry.meta, ObjectMeta):
        name, meta = entry.name.encode(), entry.meta
        pack_inode_of(KIND_FILE, 1, name, meta.size_bytes, meta.mtime_ns, meta.version, meta.posix)


def fuzz(data: bytes) -> None:
    trio.run(_list, data)


def _try(parse: Callable[[bytes], object], data: bytes) -> None:
    with suppress(OriginError):
        parse(data)


PARSERS = tuple(
    partial(_try, parse)
    for parse in (
        next_token,
        partial(next_marker, page_end="a"),
        partial(parse_page, prefix=""),
        partial(parse_tree, prefix=""),
    )
)
"""What is measured with `GROWING`."""
