"""Which keys are names, and how a listing becomes the entries of one directory.

The rules are those of docs/SEMANTICS.md and the same for every origin.
"""

import re
from collections.abc import Awaitable, Callable, Iterable

from cachefs.types import Entry, ObjectMeta

NAME_MAX_BYTES = 255
"""NAME_MAX of Linux: the longest name the kernel accepts, in bytes."""

_UNFIT = re.compile("[/\0\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that no byte stands for can't be told to a kernel."""
_NO_KEY = re.compile("[/\0-\x1f\x7f\ud800-\udfff]")


def is_encodable(text: str) -> bool:
    """Whether bytes stand for it: JSON can hold halves of characters, for which none do."""
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
    """Whether `name` is a file name that an object store can be asked for.

    Control characters are refused by obstore, and a lone surrogate is no part of any key:
    keys are UTF-8.
    """
    if _NO_KEY.search(name) or name in ("", ".", ".."):
        return False
    return len(name) * 4 <= NAME_MAX_BYTES or is_name(name)


def join(root: str, path: str) -> str:
    """`path` below `root`; either may be empty."""
    return f"{root}/{path}" if root and path else root or path


def chunked(entries: list[Entry], page_size: int) -> Iterable[list[Entry]]:
    """Cut `entries` into pages of at most `page_size`."""
    for start in range(0, len(entries), page_size):
        yield entries[start : start + page_size]


def resolve_twins(entries: Iterable[Entry]) -> list[Entry]:
    """Each name once, by the rule of `Origin.stat`, for a listing that is complete."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        rival = by_name.get(entry.name)
        if rival is None or _rank(entry) > _rank(rival):
            by_name[entry.name] = entry
    return list(by_name.values())


def _rank(entry: Entry) -> int:
    if entry.is_dir:
        return 1
    return 2 if _size(entry) else 0


class TwinMerger:
    """`resolve_twins` for a listing that arrives page by page in key order.

    The key `a` and the prefix `a/` may be pages apart, with `a-1` and `a.txt` between them; but
    all keys between them begin with `a`. So it is enough to remember the files whose names are
    prefixes of the current name: a stack of at most 255, however long the listing. An entry that
    comes twice in a row is one entry.
    """

    def __init__(self) -> None:
        self._stack: list[Entry] = []
        self._last_dir = ""

    def feed(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries that are now decided. Empty files are held back while a twin may follow."""
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
            elif not _size(stack[-1]):
                stack.pop()
                out.append(entry)
        return out

    def finish(self) -> list[Entry]:
        """The entries that were still held back."""
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


class Pages:
    """An asynchronous iterator over pages, made from a coroutine that returns None at the end.

    An async generator would do, but trio warns when one is dropped half-way, and half-way is
    where a reader stops that has found its name.
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
