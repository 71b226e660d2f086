"""One directory of a bucket, page by page, and on the way what fits of the directories below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from cachefs.origin.names import TwinMerger, resolve_twins
from cachefs.origin.s3_listing import Page, PageRequest, next_token, parse_page, parse_tree
from cachefs.types import Entry

if TYPE_CHECKING:
    from cachefs.origin.object_store import ObjectStoreOrigin
    from cachefs.origin.prefetch import Prefetch

T = TypeVar("T")

_DEEP_PATHS = 10_000
"""Directories remembered as having more below them than one LIST shows."""


class PagedListing:
    """The state of one `list_dir`: the next page is on its way while this one is parsed. A page
    that fails, or is given up, is asked for again by the next call.

    If the caller takes what lies `below`, the first LIST has no delimiter. So one request shows a
    tree of up to 1,000 keys with all its directories. Of a larger one it shows the beginning; then
    the directory is listed from there if it has only files so far, else anew, by delimiter, and so
    from then on.
    """

    def __init__(
        self, origin: ObjectStoreOrigin, path: str, below: dict[str, list[Entry]] | None
    ) -> None:
        self._origin = origin
        self._path = path
        self._below = below
        self._seeks_below = below is not None and path not in origin.deep_paths
        self._next = PageRequest("")
        self._started: Prefetch[bytes] | None = None
        self._merger = TwinMerger()
        self._keys = 0
        self._fetched_all = False
        self._ended = False

    async def next_page(self) -> list[Entry] | None:
        """Decided entries of the next page that has any, or None at the end."""
        if not self._next.prefix:
            prefix = self._origin.dir_prefix(self._path)
            self._next = PageRequest(prefix, "" if self._seeks_below else "/")
        while not self._ended:
            entries: list[Entry] = []
            if not self._fetched_all:
                page = await (self._first_keys() if self._seeks_below else self._next_fetched())
                self._keys += page.keys
                self._origin.counters.skipped_keys += page.skipped
                entries = self._merger.feed(page.entries)
            if self._fetched_all:
                if not self._keys and self._path:
                    raise await self._origin.no_such_dir(self._path)
                self._ended = True
                entries += self._merger.finish()
            if entries:
                return entries
        return None

    async def _first_keys(self) -> Page:
        """The first LIST, without a delimiter. The page is empty if it has to be done again."""
        prefix = self._next.prefix
        body = await self._origin.fetch_page(self._origin.start_page(self._next))
        tree = await _in_thread(partial(parse_tree, body, prefix))
        page = tree.pages.pop("", None) or Page([], 0, 0)
        assert self._below is not None
        for path, part in tree.pages.items():
            if tree.is_whole or not tree.last_key.startswith(f"{prefix}{path}/"):
                full = f"{self._path}/{path}" if self._path else path
                self._below[full] = resolve_twins(part.entries)
        self._seeks_below = False
        self._fetched_all = tree.is_whole
        if tree.is_whole:
            return page
        if tree.pages:
            if len(self._origin.deep_paths) >= _DEEP_PATHS:
                self._origin.deep_paths.clear()
            self._origin.deep_paths.add(self._path)
            self._next = PageRequest(prefix, "/")
            return Page([], 0, 0)
        self._next = PageRequest(prefix, "/", start_after=tree.last_key)
        return page

    async def _next_fetched(self) -> Page:
        """The next page. Changes nothing but `_started` unless it succeeds."""
        asked, self._started = self._started or self._origin.start_page(self._next), None
        body = await self._origin.fetch_page(asked)
        token = next_token(body)
        following = PageRequest(self._next.prefix, "/", token)
        # Asked for before this page is parsed, and given up if it turns out to be no listing.
        started = self._origin.start_page(following) if token else None
        page = await _in_thread(partial(parse_page, body, self._next.prefix))
        self._started, self._next = started, following
        self._fetched_all = token is None
        return page


async def _in_thread(parse: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(parse, abandon_on_cancel=True)
