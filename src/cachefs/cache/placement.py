"""Which tier a block belongs in. Pure.

The tiers of a mount are *levels*, fastest first: MEM, SSD, HDD. A level has one or more *places*
(cache directories). The rules:

1. **Home.** Within a level each block has one place, found by rendezvous hashing, each place's
   chance being its share of the quotas: a place that is added or removed moves no more blocks
   than it must. While a place can't be used its blocks' home is the next one in their order.
2. **Enter.** A fetched block enters the fastest level whose home for it has room, or makes room
   by the policy. If none does it is served and not kept.
3. **Demote.** A block that has to go from one level enters, by the same rule, one of those below;
   if none takes it it is dropped.
4. **Promote.** A hit below the fastest level moves the block up to the next level if that has
   free room, or if the block was used again in a quarter of the time for which the oldest blocks
   up there have been idle: it would have been worth its place there. In shuffled epochs that is
   rare, which is right: what was just read is what will be read last.
5. **Rest.** A block that was stored or moved within the last second is not moved: no block is
   copied twice in a second, however the tiers push.

A block is in one tier, and for the moments of a move in two, with the same bytes. A look-up asks
all places, in the order of `Placement.order`.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from cachefs.types import BlockKey

PROMOTE_FACTOR = 4
"""Rule 4: how much sooner than the oldest blocks above are idle a block must be used again."""
REST_S = 1.0
"""Rule 5."""


class Place(NamedTuple):
    """`name` is stable over restarts (the directory's uuid), `weight` its quota; level 0 is the
    fastest."""

    name: bytes
    weight: int
    level: int


class Placement:
    """Rules 1 to 3. Places go by their position in the sequence that is given here."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._seeds = [xxhash.xxh3_64_intdigest(place.name) for place in places]
        count = max((place.level for place in places), default=-1) + 1
        self._levels = [
            [number for number, place in enumerate(places) if place.level == level]
            for level in range(count)
        ]
        # With one place a level, the same for every block.
        self._fixed = [level[0] for level in self._levels if level]
        self._hashed = any(len(level) > 1 for level in self._levels)

    def order(self, key: BlockKey) -> list[int]:
        """All places, level by level, the block's home in each first."""
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
        """Where the block enters, on level `first_level` or a slower one; None: nowhere."""
        for level in self._levels[first_level:]:
            home = next((number for number in self._order_in(level, key) if usable(number)), None)
            if home is not None and takes(home):
                return home
        return None

    def home(self, key: BlockKey, level: int, usable: Callable[[int], bool]) -> int | None:
        """The block's home in one level; None if no place of the level can be used."""
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
    """Rule 4, for a block that is read after `age` reads of others."""
    return room_above or age * PROMOTE_FACTOR < oldest_age_above


class Resting:
    """Rule 5: the blocks that were stored or moved within the last second, and nothing older."""

    def __init__(self) -> None:
        self._since: dict[BlockKey, float] = {}
        self._queue: deque[tuple[float, BlockKey]] = deque()

    def note(self, key: BlockKey, now_s: float) -> None:
        """The block has just been copied."""
        self._since[key] = now_s
        self._queue.append((now_s, key))
        self.forget(now_s)

    def __contains__(self, key: BlockKey) -> bool:
        """As of the last `forget` or `note`."""
        return key in self._since

    def forget(self, now_s: float) -> None:
        """Let those go that have rested."""
        queue, since = self._queue, self._since
        while queue and queue[0][0] <= now_s - REST_S:
            noted_s, key = queue.popleft()
            if since.get(key) == noted_s:
                del since[key]
