"""After an unclean end: slab files that the index doesn't know.

A slab that was created within the last second before a crash has a file and no row. Its header
says what it is and its table what it holds, so it is taken in again, in the background, while
the cache already serves. (Blocks lost from slabs that do have a row come back when the slab is
first opened: `TierStore.open_slab`.)
"""

from cachefs.cache.store import TierStore
from cachefs.format.index_record import NO_CLASS


async def adopt_orphans(store: TierStore) -> None:
    """Open every slab that has no class. Those that are damaged stay without one, free for any
    class to take."""
    orphans = [slab for slab in store.slabs.by_id.values() if slab.class_index == NO_CLASS]
    for slab in orphans:
        await store.open_slab(slab)
