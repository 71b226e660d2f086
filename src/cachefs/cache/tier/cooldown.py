"""The blocks that were stored or moved within the last second, and are not moved again yet."""

from collections import deque

from cachefs.types import BlockKey

COOLDOWN_S = 1.0
"""The cooldown of a block after it was stored or moved."""


class Cooldown:
    """Rule 5 of `levels/placement.py`. All tiers of a mount share one object."""

    def __init__(self) -> None:
        self._since: dict[BlockKey, float] = {}
        self._queue: deque[tuple[float, BlockKey]] = deque()

    def begin(self, key: BlockKey, now_s: float) -> None:
        """Begin the cooldown of a block that has just been copied."""
        self._since[key] = now_s
        self._queue.append((now_s, key))
        self.expire(now_s)

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether the block was in cooldown at the last `expire` or `begin`."""
        return key in self._since

    def expire(self, now_s: float) -> None:
        """Remove the blocks whose cooldown has ended."""
        queue, since = self._queue, self._since
        while queue and queue[0][0] <= now_s - COOLDOWN_S:
            noted_s, key = queue.popleft()
            if since.get(key) == noted_s:
                del since[key]
