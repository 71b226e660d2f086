"""Limits of bytes per second: a token bucket, and a queue of requests that share one."""

import math
from bisect import insort
from collections.abc import Callable

import trio

from cachefs.types import Priority, Turn

_BURST_S = 0.05
"""The burst that is allowed after a pause, in seconds at the full rate."""
_SPARE_S = 0.025
"""The part of the burst that only readers may use. So a reader that finds no other reader need not
wait for bytes that the background has just taken."""
_PIECE_S = 0.02
"""What the background takes at a time. Less than `_SPARE_S`, and late wake-ups still lose
nothing."""
_BEST_READ_S = 0.25
_LOOK_S = 1.0


class TokenBucket:
    """Computes waiting times; it does not sleep. After `reserve`, the caller must wait for the
    returned time before it uses the bytes."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """`bytes_per_s` None means no limit."""
        self._rate = bytes_per_s
        self._free_at = float("-inf")

    @property
    def bytes_per_s(self) -> float | None:
        return self._rate

    @property
    def free_at(self) -> float:
        """When all bytes that were reserved have been sent. In the past if there is a burst."""
        return self._free_at

    def set_rate(self, bytes_per_s: float | None, now: float) -> None:
        """Set the rate. Bytes that are already reserved are sent at the new rate."""
        if self._rate and bytes_per_s and self._free_at > now:
            self._free_at = now + (self._free_at - now) * self._rate / bytes_per_s
        elif not bytes_per_s:
            self._free_at = float("-inf")
        self._rate = bytes_per_s

    def reserve(self, size_bytes: float, now: float) -> float:
        """Reserve `size_bytes` and return the seconds until they may be used."""
        if not self._rate:
            return 0.0
        starts_at = max(self._free_at, now - _BURST_S)
        self._free_at = starts_at + size_bytes / self._rate
        return max(0.0, starts_at - now)

    def give_back(self, size_bytes: float) -> None:
        """Return `size_bytes` that were reserved but not used."""
        if self._rate:
            self._free_at -= size_bytes / self._rate


class _Claim:
    """A request in the queue. `tag` is its place among those of the same priority."""

    __slots__ = ("left_bytes", "priority", "tag", "turn", "woken")

    def __init__(self, turn: Turn, size_bytes: int, tag: float) -> None:
        self.turn = turn
        self.priority = turn.priority
        self.left_bytes: float = size_bytes
        self.tag = tag
        self.woken = trio.Event()

    def order(self) -> tuple[Priority, float]:
        return self.priority, self.tag


class Bandwidth:
    """The queue of an origin's requests for its bandwidth limit; `ResilientOrigin` owns it.

    **Readers first.** A request waits for all requests of a higher priority. What a reader waits
    for takes its bytes all at once. Other requests take them in small pieces, and begin when they
    have all of them, so a reader that comes meanwhile waits for one piece at most.

    **Equal shares.** Each of the readers that wait gets the same bytes per second, so who reads
    small files does not wait for each block of a large one. A request's tag is the tag of the one
    that was served last when it came, plus its own size; the smallest tag is served first.
    (This is self-clocked fair queueing.)
    """

    def __init__(self, bytes_per_s: float | None, on_wait: Callable[[], None]) -> None:
        """`bytes_per_s` None means no limit. `on_wait()` is called at least each `_LOOK_S` while
        requests wait."""
        self._bucket = TokenBucket(bytes_per_s)
        self._on_wait = on_wait
        self._waiting: list[_Claim] = []
        """Ordered by `_Claim.order`. Only the first one waits for a time; the others are woken."""
        self._last_tag = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        return self._bucket.bytes_per_s

    @property
    def best_read_bytes(self) -> float:
        """The best size of one read: a reader that joins it waits for all of it."""
        return math.inf if not self.bytes_per_s else self.bytes_per_s * _BEST_READ_S

    def set_rate(self, bytes_per_s: float | None) -> None:
        """See `TokenBucket.set_rate`."""
        self._bucket.set_rate(bytes_per_s, trio.current_time())
        for claim in self._waiting:
            claim.woken.set()

    async def take(self, size_bytes: int, turn: Turn) -> None:
        """Wait until `size_bytes` may be used. A cancelled wait takes nothing."""
        claim = _Claim(turn, size_bytes, self._last_tag + size_bytes)
        insort(self._waiting, claim, key=_Claim.order)
        try:
            while not self._serve(claim):
                await self._wait(claim)
        except BaseException:
            self._bucket.give_back(size_bytes - claim.left_bytes)
            raise
        finally:
            self._waiting.remove(claim)
            self._wake_first()

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were taken but not used."""
        self._bucket.give_back(size_bytes)
        self._wake_first()

    def reorder(self) -> None:
        """Note that the priority of turns has risen."""
        for claim in self._waiting:
            if claim.priority is not claim.turn.priority:
                claim.priority = claim.turn.priority
                claim.tag = self._last_tag + claim.left_bytes
        self._waiting.sort(key=_Claim.order)
        self._wake_first()

    def _serve(self, claim: _Claim) -> bool:
        """Give the request what it may have now. Return whether it has all."""
        rate = self._bucket.bytes_per_s
        if not rate:
            return True
        if self._waiting[0] is not claim:
            return False
        now = trio.current_time()
        while claim.left_bytes and self._usable_at(claim) <= now:
            whole = claim.priority is Priority.READER
            piece_bytes = claim.left_bytes if whole else min(claim.left_bytes, rate * _PIECE_S)
            self._bucket.reserve(piece_bytes, now)
            claim.left_bytes -= piece_bytes
            self._last_tag = max(self._last_tag, claim.tag)
        return not claim.left_bytes

    def _usable_at(self, claim: _Claim) -> float:
        """When the first request of the queue may have more bytes."""
        spare_s = 0.0 if claim.priority is Priority.READER else _SPARE_S
        return self._bucket.free_at + spare_s

    async def _wait(self, claim: _Claim) -> None:
        """Wait until it may be worth while to try `_serve` again."""
        self._on_wait()
        claim.woken = trio.Event()
        until = math.inf
        if self._waiting[0] is claim:
            until = min(self._usable_at(claim), trio.current_time() + _LOOK_S)
        with trio.move_on_at(until):
            await claim.woken.wait()

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[0].woken.set()
