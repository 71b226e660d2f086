"""One directory of a bucket, page by page, and on the way what fits of the directories below it."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import trio

from cachefs.errors import BadDataError, OriginError
from cachefs.origin.base import OriginCounters
from cachefs.origin.names import TwinMerger, join, resolve_twins
from cachefs.origin.prefetch import Prefetch
from cachefs.origin.s3_listing import (
    Page,
    PageRequest,
    Tree,
    next_marker,
    next_token,
    parse_page,
    parse_tree,
)
from cachefs.types import Entry

T = TypeVar("T")

_DIRECTORIES = 10_000
"""Directories that something is remembered of."""
_LISTS_PER_WIDE = 8
"""So many directories of one parent are listed alone before more than one is asked for."""
EMPTY_PAGES = 100
"""So many pages without a key may follow each other (S3 gives such where keys were deleted)."""


class TreeShapes:
    """What the listings of a bucket have shown of its directories: which way suits them."""

    def __init__(self) -> None:
        self._deep: set[str] = set()
        self._listed_in: dict[str, int] = {}

    def is_deep(self, path: str) -> bool:
        """There is more below than one LIST shows."""
        return path in self._deep

    def note_deep(self, path: str) -> None:
        if len(self._deep) >= _DIRECTORIES:
            self._deep.clear()
        self._deep.add(path)

    def note_listed(self, path: str) -> bool:
        """That a directory is listed. True if so many beside it were that what follows it is
        likely to be asked for, too, and worth a longer page."""
        if not path:
            return False
        parent = path.rpartition("/")[0]
        if len(self._listed_in) >= _DIRECTORIES:
            self._listed_in.clear()
        listed = self._listed_in[parent] = self._listed_in.get(parent, 0) + 1
        return listed % _LISTS_PER_WIDE == 0


class PageSource(Protocol):
    """What a listing needs of its origin."""

    shapes: TreeShapes
    counters: OriginCounters

    def dir_prefix(self, path: str) -> str:
        """What the keys below a directory begin with. Raises `NotFoundError` for no name."""

    def start_page(self, request: PageRequest) -> Prefetch[bytes]:
        """Send one LIST now."""

    async def fetch_page(self, started: Prefetch[bytes]) -> bytes:
        """The answer to a LIST. Raises `OriginError`."""

    async def no_such_dir(self, path: str) -> OriginError:
        """Why there is not a single key below."""


class PagedListing:
    """The state of one `list_dir`: the next page is on its way while this one is parsed. A page
    that fails, or is given up, is asked for again by the next call.

    If the caller takes what lies `below`, the first LIST has no delimiter. So one request shows a
    tree of up to 1,000 keys with all its directories. Of a larger one it shows the beginning; then
    the directory is listed from there if it has only files so far, else anew, by delimiter, and so
    from then on. Every eighth time that a directory of the same parent is listed, the page goes on
    with the directories that follow it.
    """

    def __init__(self, origin: PageSource, path: str, below: dict[str, list[Entry]] | None) -> None:
        self._origin = origin
        self._path = path
        self._below = below
        self._seeks_below = below is not None and not origin.shapes.is_deep(path)
        self._is_wide = self._seeks_below and origin.shapes.note_listed(path)
        self._next = PageRequest("")
        self._started: Prefetch[bytes] | None = None
        self._merger = TwinMerger()
        self._keys = 0
        self._empty_pages = 0
        self._places: set[int] = set()
        """Hashes of tokens and markers: a listing that comes back to one would never end."""
        self._fetched_all = False
        self._ended = False

    async def next_page(self) -> list[Entry] | None:
        """Decided entries of the next page that has any, or None at the end."""
        if not self._next.delimiter:  # the first call
            self._next = PageRequest(self._origin.dir_prefix(self._path), "/")
        while not self._ended:
            entries: list[Entry] = []
            if not self._fetched_all:
                page = await (self._tree_page() if self._seeks_below else self._next_fetched())
                self._keys += page.keys
                if page.skipped:
                    self._origin.counters.skip(self._path, page.example, page.skipped)
                entries = self._merger.feed(page.entries)
            if self._fetched_all:
                if not self._keys and self._path:
                    raise await self._origin.no_such_dir(self._path)
                self._ended = True
                entries += self._merger.finish()
            if entries:
                return entries
        return None

    async def _tree_page(self) -> Page:
        """The first LIST, without a delimiter. The page is empty if it has to be done again."""
        own_prefix = self._next.prefix
        if self._is_wide:
            top = self._path.rpartition("/")[0]
            request = PageRequest(self._origin.dir_prefix(top), start_after=own_prefix)
        else:
            top = self._path
            request = PageRequest(own_prefix)
        body = await self._origin.fetch_page(self._origin.start_page(request))
        tree = await _in_thread(partial(parse_tree, body, request.prefix))
        is_whole = tree.is_whole or (tree.is_in_order and _is_past(tree.last_key, own_prefix))
        pages = {join(top, path): page for path, page in tree.pages.items()}
        page = pages.pop(self._path, None) or Page([], 0, 0)
        self._take_below(pages, tree, request.prefix.removesuffix(top and top + "/"))
        if self._is_wide and not page.keys:  # perhaps there is nothing but its own marker
            self._is_wide = False
            return page
        self._seeks_below = False
        self._fetched_all = is_whole
        if is_whole:
            return page
        if tree.last_key and tree.is_in_order and not self._has_directories(pages):
            marker = next_marker(body, tree.last_key) or ""
            self._next = self._next._replace(start_after=tree.last_key, marker=marker)
            return page
        self._origin.shapes.note_deep(self._path)
        return Page([], 0, 0)

    def _take_below(self, pages: dict[str, Page], tree: Tree, root: str) -> None:
        """Those that are complete; the page may have begun in the middle of those above."""
        assert self._below is not None
        for path, page in pages.items():
            is_above = not path or self._path.startswith(path + "/")
            goes_on = not tree.is_in_order or tree.last_key.startswith(f"{root}{path}/")
            if not is_above and (tree.is_whole or not goes_on):
                self._below[path] = resolve_twins(page.entries)
                self._origin.counters.begin_listing(path)
                if page.skipped:
                    self._origin.counters.skip(path, page.example, page.skipped)

    def _has_directories(self, pages: dict[str, Page]) -> bool:
        start = self._path + "/" if self._path else ""
        return any(path.startswith(start) for path in pages)

    async def _next_fetched(self) -> Page:
        """The next page. Changes nothing but `_started` unless it succeeds."""
        asked, self._started = self._started or self._origin.start_page(self._next), None
        body = await self._origin.fetch_page(asked)
        token = next_token(body)
        following = self._next._replace(token=token, start_after="", marker="")
        # Asked for before this page is parsed, and given up if it turns out to be no listing.
        started = self._origin.start_page(following) if self._goes_on(token) else None
        page = await _in_thread(partial(parse_page, body, self._next.prefix))
        marker = next_marker(body, page.last_key)
        if self._goes_on(marker):
            following = following._replace(start_after=marker or "", marker=marker or "")
        self._empty_pages = 0 if page.keys else self._empty_pages + 1
        if self._empty_pages > EMPTY_PAGES:
            raise BadDataError(
                f"the listing of {self._next.prefix or '/'} has {EMPTY_PAGES} pages without a key"
            )
        self._started, self._next = started, following
        self._places.update(hash(place) for place in (token, marker) if place)
        self._fetched_all = token is None and marker is None
        return page

    def _goes_on(self, place: str | None) -> bool:
        """Whether there is a next page. Raises `BadDataError` if it is one that has been there."""
        if place and hash(place) in self._places:
            raise BadDataError(f"the listing of {self._next.prefix or '/'} goes round in a circle")
        return place is not None


def _is_past(key: str, prefix: str) -> bool:
    """Whether all keys with the prefix come before this one, which was sent last."""
    return bool(key) and not key.startswith(prefix)


async def _in_thread(parse: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(parse, abandon_on_cancel=True)
