"""Compute how much of a load job fits into the cache."""

from collections.abc import Sequence

from cachefs.cache.counters import TierStatus
from cachefs.format.slab import SLOT_CLASSES, class_of
from cachefs.load.spec import TierRoom
from cachefs.types import BLOCK_BYTES

_WHOLE_BLOCK_BYTES = SLOT_CLASSES[class_of(BLOCK_BYTES)]


def charge_bytes(size_bytes: int) -> int:
    """Return the bytes of slots that a file of `size_bytes` takes in a cache directory. Slots have
    fixed sizes, so this may be more than `size_bytes`."""
    whole, rest = divmod(size_bytes, BLOCK_BYTES)
    return whole * _WHOLE_BLOCK_BYTES + (SLOT_CLASSES[class_of(rest)] if rest else 0)


def room_by_tier(tiers: Sequence[TierStatus], wanted_bytes: int) -> list[TierRoom]:
    """Return how `wanted_bytes` (of slots) spread over the tiers, fastest first, if only pinned
    blocks stay there besides."""
    rooms = []
    for tier in tiers:
        room_bytes = max(0, tier.high_bytes - tier.pinned_bytes)
        taken = min(room_bytes, wanted_bytes)
        wanted_bytes -= taken
        rooms.append(
            TierRoom(
                path=tier.path,
                medium=tier.medium.value,
                room_bytes=room_bytes,
                wanted_bytes=taken,
            )
        )
    return rooms
