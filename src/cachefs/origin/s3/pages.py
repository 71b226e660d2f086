"""Lists one directory of a bucket page by page, with deeper directories that fit on a page."""

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Protocol, TypeVar

import trio

from cachefs.errors import AccessDeniedError, BadDataError, OriginError
from cachefs.origin.base import OriginCounters
from cachefs.origin.early_call import EarlyTask
from cachefs.origin.names import TwinMerger, join, resolve_twins
from cachefs.origin.s3.lister import PageRequest
from cachefs.origin.s3.listing import (
    Page,
    Tree,
    next_marker,
    next_token,
    parse_page,
    parse_tree,
)
from cachefs.origin.s3.versions import Versions
from cachefs.types import Entry

T = TypeVar("T")

_DIRECTORIES = 10_000
"""The most directories in each collection of `TreeShapes`."""
_LISTS_PER_WIDE = 8
"""Of so many listings below the same parent, one also covers the siblings that follow."""
_MOST_DENIALS = 3
"""After so many denials in succession, LISTs always have a delimiter."""
EMPTY_PAGES = 100
"""The most successive pages without a key (S3 sends such pages where keys were deleted)."""


class TreeShapes:
    """What earlier listings of a bucket showed of its directories. `PagedListing` uses it to choose
    the form of its first LIST."""

    def __init__(self) -> None:
        self._deep: set[str] = set()
        self._listed_in: dict[str, int] = {}
        self._denials = 0

    def is_deep(self, path: str) -> bool:
        """Whether the directory has more keys below it than one LIST shows, or a LIST without a
        delimiter is denied there."""
        return self._denials >= _MOST_DENIALS or path in self._deep

    def note_denied(self, path: str) -> None:
        """Record that a LIST without a delimiter was denied. After some of them in succession, none
        is sent any more."""
        self._denials += 1
        self.note_deep(path)

    def note_allowed(self) -> None:
        """Record that a LIST without a delimiter was allowed."""
        self._denials = 0

    def note_deep(self, path: str) -> None:
        if len(self._deep) >= _DIRECTORIES:
            self._deep.clear()
        self._deep.add(path)

    def note_listed(self, path: str) -> bool:
        """Record that a directory is listed. Return True once per `_LISTS_PER_WIDE` listings below
        the same parent: then the next siblings will probably be listed, too, so one LIST should
        cover several of them."""
        if not path:
            return False
        parent = path.rpartition("/")[0]
        if len(self._listed_in) >= _DIRECTORIES:
            self._listed_in.clear()
        listed = self._listed_in[parent] = self._listed_in.get(parent, 0) + 1
        return listed % _LISTS_PER_WIDE == 0


class PageSource(Protocol):
    """The interface that `PagedListing` needs of its origin."""

    shapes: TreeShapes
    versions: Versions
    counters: OriginCounters

    def dir_prefix(self, path: str) -> str:
        """Return the prefix of all keys below a directory. Raises `NotFoundError` if `path` can't
        be a key."""

    def start_page(self, request: PageRequest) -> EarlyTask[bytes]:
        """Send one LIST now."""

    async def fetch_page(self, started: EarlyTask[bytes]) -> bytes:
        """Wait for the answer to a LIST and return it. Raises `OriginError`."""

    async def no_such_dir(self, path: str) -> OriginError:
        """Return the error that explains why there is no key below `path`."""


class _Step(Enum):
    """What a `PagedListing` does next."""

    LIST_SIBLINGS = auto()
    """Send one LIST without a delimiter: of the parent, from this directory on."""
    LIST_TREE = auto()
    """Send one LIST without a delimiter: of this directory."""
    LIST_PAGES = auto()
    """Send LISTs with a delimiter until there is no further page."""
    FINISH = auto()
    """All keys are known. Return the entries that are held back."""
    END = auto()


class PagedListing:
    """The state of one `list_dir`. The next page is in flight while this one is parsed. If a page
    fails or is cancelled, the next call requests it again.

    If the caller passes `below`, the first LIST has no delimiter, so one request shows a tree of up
    to 1,000 keys with all its directories. Of a larger tree it shows the beginning. If the
    beginning has only files, the listing continues from there. Otherwise it starts again with a
    delimiter, and later listings of this directory use the delimiter at once. Every eighth listing
    of a directory below the same parent continues with the siblings that follow it.

    A policy may allow only LISTs with the delimiter "/", or only below some directories. So after a
    denial of a LIST without it, one with it follows.
    """

    def __init__(self, origin: PageSource, path: str, below: dict[str, list[Entry]] | None) -> None:
        self._origin = origin
        self._path = path
        self._below = below
        self._step = _Step.LIST_PAGES
        if below is not None and not origin.shapes.is_deep(path):
            is_wide = origin.shapes.note_listed(path)
            self._step = _Step.LIST_SIBLINGS if is_wide else _Step.LIST_TREE
        self._next = PageRequest("")
        self._started: EarlyTask[bytes] | None = None
        self._merger = TwinMerger()
        self._keys = 0
        self._empty_pages = 0
        self._places: set[int] = set()
        """Hashes of the tokens and markers so far. A listing that repeats one would never end."""

    async def next_page(self) -> list[Entry] | None:
        """Return the final entries of the next page that has any, or None at the end."""
        if not self._next.delimiter:  # this is the first call
            self._next = PageRequest(self._origin.dir_prefix(self._path), "/")
        while self._step is not _Step.END:
            entries: list[Entry] = []
            if self._step is not _Step.FINISH:
                page = await self._page()
                self._keys += page.keys
                if page.unshown:
                    self._origin.counters.note_unshown(self._path, page.example, page.unshown)
                entries = self._merger.feed(self._entries_of(page))
                _note_hidden(self._origin.counters, self._path, self._merger.hidden)
                self._merger.hidden.clear()
            if self._step is _Step.FINISH:
                if not self._keys and self._path:
                    raise await self._origin.no_such_dir(self._path)
                self._step = _Step.END
                entries += self._merger.finish()
            if entries:
                return entries
        return None

    async def _page(self) -> Page:
        """Send the next LIST and return its page of this directory. Set `_step`."""
        if self._step is _Step.LIST_PAGES:
            return await self._delimited_page()
        return await self._tree_page(with_siblings=self._step is _Step.LIST_SIBLINGS)

    async def _tree_page(self, with_siblings: bool) -> Page:
        """Send a LIST without a delimiter. Return an empty page if the directory must be listed
        again in another way."""
        own_prefix = self._next.prefix
        if with_siblings:
            top = self._path.rpartition("/")[0]
            request = PageRequest(self._origin.dir_prefix(top), start_after=own_prefix)
        else:
            top = self._path
            request = PageRequest(own_prefix)
        try:
            body = await self._origin.fetch_page(self._origin.start_page(request))
        except AccessDeniedError:
            self._origin.shapes.note_denied(top)
            self._step = _Step.LIST_TREE if with_siblings else _Step.LIST_PAGES
            return Page([])
        self._origin.shapes.note_allowed()
        tree = await _in_thread(partial(parse_tree, body, request.prefix))
        pages = {join(top, path): page for path, page in tree.pages.items()}
        page = pages.pop(self._path, None) or Page([])
        self._take_below(pages, tree, request.prefix.removesuffix(top and top + "/"))
        if with_siblings and not page.keys:  # perhaps the directory has only its own marker
            self._step = _Step.LIST_TREE
            return page
        if tree.is_whole or (tree.is_in_order and _is_past(tree.last_key, own_prefix)):
            self._step = _Step.FINISH
            return page
        self._step = _Step.LIST_PAGES
        if tree.last_key and tree.is_in_order and not self._has_directories(pages):
            marker = next_marker(body, tree.last_key) or ""
            self._next = self._next._replace(start_after=tree.last_key, marker=marker)
            return page
        self._origin.shapes.note_deep(self._path)
        return Page([])

    def _take_below(self, pages: dict[str, Page], tree: Tree, root: str) -> None:
        """Put the complete directories into `below`. Directories above this one are left out,
        because the page may begin in their middle."""
        assert self._below is not None
        for path, page in pages.items():
            is_above = not path or self._path.startswith(path + "/")
            goes_on = not tree.is_in_order or tree.last_key.startswith(f"{root}{path}/")
            if not is_above and (tree.is_whole or not goes_on):
                hidden: list[str] = []
                self._below[path] = resolve_twins(self._entries_of(page), hidden)
                self._origin.counters.begin_listing(path)
                _note_hidden(self._origin.counters, path, hidden)
                if page.unshown:
                    self._origin.counters.note_unshown(path, page.example, page.unshown)

    def _entries_of(self, page: Page) -> list[Entry]:
        if page.lacks_e_tags:
            self._origin.versions.tell_by_time()
        return self._origin.versions.told_in(page.entries)

    def _has_directories(self, pages: dict[str, Page]) -> bool:
        start = self._path + "/" if self._path else ""
        return any(path.startswith(start) for path in pages)

    async def _delimited_page(self) -> Page:
        """Return the next page. If this fails, it has changed only `_started`."""
        asked, self._started = self._started or self._origin.start_page(self._next), None
        body = await self._origin.fetch_page(asked)
        token = next_token(body)
        following = self._next._replace(token=token, start_after="", marker="")
        # The next page is requested before this one is parsed; if parsing fails, it is dropped.
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
        if token is None and marker is None:
            self._step = _Step.FINISH
        return page

    def _goes_on(self, place: str | None) -> bool:
        """Whether there is a next page. Raises `BadDataError` if `place` occurred before."""
        if place and hash(place) in self._places:
            raise BadDataError(f"the listing of {self._next.prefix or '/'} goes round in a circle")
        return place is not None


def _note_hidden(counters: OriginCounters, path: str, hidden: list[str]) -> None:
    if hidden:
        counters.note_unshown(path, join(path, hidden[0]), len(hidden))


def _is_past(key: str, prefix: str) -> bool:
    """Whether `key`, the last one of a page, lies behind all keys with `prefix`."""
    return bool(key) and not key.startswith(prefix)


async def _in_thread(parse: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(parse, abandon_on_cancel=True)
