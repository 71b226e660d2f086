"""The budget of `--prefetch siblings`: how many bytes may be fetched ahead and not be used yet.

A shuffled epoch and a list of a few files look alike until much has been read. So what is fetched
ahead is a guess, and only this budget bounds what wrong guesses cost: at every moment the unused
bytes are at most as many as readers have read, or `_LEAST_BYTES` if that is more. The same holds
for the time since the last pause, because a job must not waste what an earlier job has earned.
"""

from collections import OrderedDict

import trio

_LEAST_BYTES = 8 << 20
_MOST_FILES = 1 << 17
"""Most files to remember that were fetched ahead and not used yet: at about 70 bytes each, 9 MB."""
_WAITING = 1_024
"""Most files to remember whose first readers wait for the origin."""
_PAUSE_S = 60.0


class AheadBudget:
    """The budget of one mount; its `SiblingPrefetcher` owns it. Only the event loop uses it, and no
    method waits.

    Files have their inode numbers, each of which stands for one version of one object. Bytes that
    were fetched ahead count as unused until a reader has read them from the cache or has waited for
    their fetch. So the bytes of a file that was evicted before a reader came, and of a failed
    fetch, count as unused for good. Bytes that were cached for another reason count as nothing.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        """Bytes that readers have read from the origin, or that were fetched ahead for them."""
        self.unused_bytes = 0
        """Bytes that were fetched ahead, or are being fetched, and that no reader has read."""
        self.recent_files = 0
        """Number of files in `read_bytes` since the last pause."""
        self._recent_read_bytes = 0
        self._recent_unused_bytes = 0
        self._unused: set[int] = set()
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._read_at_s = trio.current_time()

    @property
    def room_bytes(self) -> int:
        """How many more bytes may be fetched ahead now; negative or 0 for none."""
        if len(self._unused) >= _MOST_FILES:
            return 0
        room_bytes = max(_LEAST_BYTES, self.read_bytes) - self.unused_bytes
        recent_bytes = max(_LEAST_BYTES, self._recent_read_bytes) - self._recent_unused_bytes
        return min(room_bytes, recent_bytes)

    def take(self, ino: int, size_bytes: int) -> bool:
        """Count a file as fetched ahead, in the step in which its fetch begins. Return False if it
        must not be fetched: there is no room, or it was fetched ahead and lost before."""
        if size_bytes > self.room_bytes or self.was_fetched(ino):
            return False
        self._unused.add(ino)
        self.unused_bytes += size_bytes
        self._recent_unused_bytes += size_bytes
        return True

    def was_fetched(self, ino: int) -> bool:
        """Whether the file was fetched ahead and no reader has come yet. It may be evicted."""
        return ino in self._unused

    def note_failed(self, ino: int) -> None:
        """Note that the file's fetch ahead has failed. The request has had its cost, so the bytes
        stay counted."""
        self._unused.discard(ino)

    def note_hit(self, ino: int, size_bytes: int) -> bool:
        """Note that a cached file is read for the first time. Return whether it was fetched
        ahead."""
        if ino not in self._unused:
            return False
        self._use(ino, size_bytes)
        return True

    def note_miss(self, ino: int, is_in_flight: bool) -> None:
        """Note that the first reader of a file waits for the origin. `is_in_flight` says that a
        fetch was under way already."""
        if not is_in_flight:
            self._unused.discard(ino)  # it was fetched ahead and evicted
        self._waiting[ino] = None
        if len(self._waiting) > _WAITING:
            self._waiting.popitem(last=False)

    def note_read(self, ino: int, size_bytes: int) -> bool:
        """Note that a reader has received the first bytes of a file, after waiting. Return whether
        the reader had waited for the origin."""
        if ino not in self._waiting:
            return False
        del self._waiting[ino]
        self._use(ino, size_bytes)
        return True

    def _use(self, ino: int, size_bytes: int) -> None:
        """Count the bytes as read, and no longer as unused."""
        now_s = trio.current_time()
        if now_s - self._read_at_s >= _PAUSE_S:
            self.recent_files = self._recent_read_bytes = self._recent_unused_bytes = 0
        self._read_at_s = now_s
        self.recent_files += 1
        self.read_bytes += size_bytes
        self._recent_read_bytes += size_bytes
        if ino in self._unused:
            self._unused.remove(ino)
            self.unused_bytes -= size_bytes
            self._recent_unused_bytes = max(0, self._recent_unused_bytes - size_bytes)
