"""Helpers for listings."""

from cachefs.origin.base import Origin
from cachefs.types import Entry


async def list_all(origin: Origin, path: str = "") -> dict[str, Entry]:
    """All entries of a directory by name; asserts that no name comes twice."""
    entries = [entry for page in await list_pages(origin, path) for entry in page]
    found = {entry.name: entry for entry in entries}
    assert len(found) == len(entries), "a name was listed twice"
    return found


async def list_pages(origin: Origin, path: str = "") -> list[list[Entry]]:
    """A directory page by page."""
    return [page async for page in origin.list_dir(path)]
