"""Decides which keys are file names, and turns a listing into the entries of one directory.

The rules are those of docs/SEMANTICS.md and apply to every origin.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress

from cachefs.types import Entry, ObjectMeta

NAME_MAX_BYTES = 255
"""NAME_MAX of Linux: the longest name the kernel accepts, in bytes."""

_UNFIT = re.compile("[/\0\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that stand for no byte can't be passed to the kernel."""
_NO_KEY = re.compile("[/\0-\x1f\x7f\ud800-\udfff]")


def is_encodable(text: str) -> bool:
    """Whether `text` can be encoded as bytes. JSON can hold lone surrogates, which can't."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def is_name(name: str) -> bool:
    """Whether `name` can be a file name on Linux."""
    if name in ("", ".", "..") or _UNFIT.search(name):
        return False
    if len(name) * 4 <= NAME_MAX_BYTES:
        return True
    return len(name.encode("utf-8", "surrogateescape")) <= NAME_MAX_BYTES


def is_key_name(name: str) -> bool:
    """Whether `name` is a file name that can be part of a key in an object store.

    Libraries of stores refuse control characters, and no key contains a lone surrogate, as keys are
    UTF-8.
    """
    if _NO_KEY.search(name) or name in ("", ".", ".."):
        return False
    return len(name) * 4 <= NAME_MAX_BYTES or is_name(name)


def join(root: str, path: str) -> str:
    """Return `path` below `root`; either may be empty."""
    return f"{root}/{path}" if root and path else root or path


def chunked(entries: list[Entry], page_size: int) -> Iterator[list[Entry]]:
    """Cut `entries` into pages of at most `page_size`."""
    for start in range(0, len(entries), page_size):
        yield entries[start : start + page_size]


def resolve_twins(entries: Iterable[Entry], hidden: list[str] | None = None) -> list[Entry]:
    """Return each name of a complete listing once. If a name is both an object and a directory, the
    rule of `Origin.stat` decides. Directories that are hidden by an object are added to `hidden`,
    with a `/` at the end."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        rival = by_name.get(entry.name)
        if rival is None or _rank(entry) > _rank(rival):
            by_name[entry.name] = entry
        is_twin = rival is not None and rival.is_dir != entry.is_dir
        if is_twin and hidden is not None and _size(by_name[entry.name]):
            hidden.append(entry.name + "/")
    return list(by_name.values())


def _rank(entry: Entry) -> int:
    if entry.is_dir:
        return 1
    return 2 if _size(entry) else 0


class TwinMerger:
    """Does `resolve_twins` for a listing that arrives page by page in key order.

    The key `a` and the prefix `a/` may be pages apart, with `a-1` and `a.txt` between them, but all
    keys between them begin with `a`. So it is enough to keep the files whose names are prefixes of
    the current name: a stack of at most 255 entries for a listing of any length. Two equal entries
    in a row count as one.
    """

    def __init__(self) -> None:
        self._stack: list[Entry] = []
        self._last_dir = ""
        self.hidden: list[str] = []
        """Directories that are hidden by an object, as in `resolve_twins`; the caller clears it."""

    def feed(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries that are final now. An empty file is held back as long as a directory
        of the same name may follow."""
        out: list[Entry] = []
        stack = self._stack
        for entry in entries:
            name, meta = entry
            while stack and not name.startswith(stack[-1].name):
                self._pop(out)
            is_twin = bool(stack) and stack[-1].name == name
            if isinstance(meta, ObjectMeta):
                if is_twin:
                    continue
                stack.append(entry)
                if meta.size_bytes:
                    out.append(entry)
                continue
            if name == self._last_dir:
                continue
            self._last_dir = name
            if not is_twin:
                out.append(entry)
            elif _size(stack[-1]):
                self.hidden.append(name + "/")
            else:
                stack.pop()
                out.append(entry)
        return out

    def finish(self) -> list[Entry]:
        """Return the entries that are still held back."""
        out: list[Entry] = []
        while self._stack:
            self._pop(out)
        return out

    def _pop(self, out: list[Entry]) -> None:
        entry = self._stack.pop()
        if not _size(entry):
            out.append(entry)


def _size(entry: Entry) -> int:
    return entry.meta.size_bytes if isinstance(entry.meta, ObjectMeta) else 0


async def next_page(pages: AsyncIterator[list[Entry]]) -> list[Entry] | None:
    """Return the next page, or None at the end."""
    with suppress(StopAsyncIteration):
        return await anext(pages)
    return None


class Pages:
    """An asynchronous iterator over pages, made from a coroutine that returns None at the end.

    It is no async generator, because trio warns when one is dropped before its end, and a reader
    that has found its name stops before the end.
    """

    def __init__(self, next_page: Callable[[], Awaitable[list[Entry] | None]]) -> None:
        self._next_page = next_page

    def __aiter__(self) -> "Pages":
        return self

    async def __anext__(self) -> list[Entry]:
        page = await self._next_page()
        if page is None:
            raise StopAsyncIteration
        return page
