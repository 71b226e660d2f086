"""Which tier a block belongs in. Pure: no I/O.

The tiers of a mount form *levels*, fastest first: MEM, SSD, HDD. A level has one or more *places*
(cache directories). The rules:

1. **Home.** Within a level each block has one place, found by rendezvous hashing. The probability
   of a place is its share of the level's quotas. So adding or removing a place moves no more
   blocks than necessary. While a place is unusable, the next place in the block's order is home.
2. **Enter.** A fetched block enters the fastest level whose home for it has room, or whose policy
   makes room. If there is none, the block is served and not stored.
3. **Demote.** A block that must leave a level enters, by the same rule, a level below. If none
   takes it, it is dropped.
4. **Promote.** A hit below the fastest level moves the block up one level if that level has free
   room, or if the block's time between uses is less than a quarter of the idle time of the oldest
   blocks there: then the block would have stayed in that level. In shuffled epochs this is rare,
   as it should be: the block read last is the one that is read again last.
5. **Cooldown** (`tier/cooldown.py`). A block that was stored or moved within the last second is not
   moved. So no block is copied twice in a second, however full the tiers are.

A block is in one tier. During a move it is in two tiers, with the same bytes. A look-up tries all
places, in the order of `Placement.order`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from cachefs.types import BlockKey

PROMOTE_FACTOR = 4
"""Rule 4: the oldest idle time in the level above must exceed this many times the block's age."""


class TierPlace(NamedTuple):
    """One cache directory. `name` is stable over restarts (the directory's uuid), `weight` is its
    quota in bytes, `level` 0 is the fastest."""

    name: bytes
    weight: int
    level: int


class Placement:
    """Rules 1 to 3. A place is named by its position in the sequence given to the constructor."""

    def __init__(self, places: Sequence[TierPlace]) -> None:
        self._places = list(places)
        self._seeds = [xxhash.xxh3_64_intdigest(place.name) for place in places]
        count = max((place.level for place in places), default=-1) + 1
        self._levels = [
            [number for number, place in enumerate(places) if place.level == level]
            for level in range(count)
        ]
        # The order if each level has one place; then it is the same for every block.
        self._fixed = [level[0] for level in self._levels if level]
        self._hashed = any(len(level) > 1 for level in self._levels)

    def order(self, key: BlockKey) -> list[int]:
        """Return all places, level by level; in each level the block's home comes first."""
        if not self._hashed:
            return self._fixed
        return [number for level in self._levels for number in self._order_in(level, key)]

    def entry(
        self,
        key: BlockKey,
        usable: Callable[[int], bool],
        takes: Callable[[int], bool],
        first_level: int = 0,
    ) -> int | None:
        """Return the place where the block enters, on `first_level` or a slower level; None if no
        place takes it."""
        for level in self._levels[first_level:]:
            home = next((number for number in self._order_in(level, key) if usable(number)), None)
            if home is not None and takes(home):
                return home
        return None

    def home(self, key: BlockKey, level: int, usable: Callable[[int], bool]) -> int | None:
        """Return the block's home in one level; None if no place of the level is usable."""
        places = self._levels[level]
        return next((number for number in self._order_in(places, key) if usable(number)), None)

    def _order_in(self, level: list[int], key: BlockKey) -> list[int]:
        if len(level) < 2:
            return level
        scores = {number: self._score(key, number) for number in level}
        return sorted(level, key=scores.__getitem__, reverse=True)

    def _score(self, key: BlockKey, number: int) -> float:
        data = key.object_id + key.block_index.to_bytes(4, "big")
        digest = xxhash.xxh3_64_intdigest(data, seed=self._seeds[number])
        return -self._places[number].weight / math.log((digest + 1) / (2**64 + 2))


def promotes(age: int, oldest_age_above: int, room_above: bool) -> bool:
    """Return whether rule 4 promotes a block that is read again after `age` block reads."""
    return room_above or age * PROMOTE_FACTOR < oldest_age_above
