"""A namespace in memory, and a look at all that it knows."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from cachefs.errors import CachefsError
from cachefs.format.inode_record import ino_of_key
from cachefs.fuse.attrs import AttrBuilder, Ownership
from cachefs.namespace.namespace import ROOT_INO
from tests.fuzz.targets._support import directory
from tests.namespace.harness import ScriptedOrigin, Tree, WallClock

_ATTRIBUTES = AttrBuilder(Ownership())
_MOST = 1000


@asynccontextmanager
async def running_tree() -> AsyncIterator[Tree]:
    """Over a source with a few files."""
    origin = ScriptedOrigin()
    for path in ("a/1", "a/2", "b/c/3", "top"):
        origin.put(path, path.encode())
    with directory() as place:
        async with trio.open_nursery() as nursery:
            tree = Tree(place / "namespace", nursery, origin, WallClock())
            await tree.start()
            try:
                yield tree
            finally:
                nursery.cancel_scope.cancel()
                tree.db.abandon()


async def look_at_all(tree: Tree) -> None:
    """As a kernel and `cachefs info` would. Expected failures are `CachefsError`s."""
    table = tree.namespace.table
    inos = [ino_of_key(key) for key, _ in tree.db.scan("inodes", b"") if len(key) == 8][:_MOST]
    for ino in {ROOT_INO, *inos}:
        try:
            inode = tree.namespace.inode(ino)
            table.stat(ino)
            _ATTRIBUTES.build(inode, inode.mtime_ns, 1.0)
            tree.namespace.source_url(inode)
            table.listing(ino)
            table.own_times(ino)
            names = [name for name, _ in table.dirents(ino)]
            for name in [*names[:10], b"1", b"absent"]:
                await tree.namespace.lookup(ino, name)
        except CachefsError:
            continue
    for ino in (ROOT_INO, *inos[:20]):
        try:
            await tree.entries(ino)
        except CachefsError:
            continue
