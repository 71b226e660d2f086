"""Stores fetched blocks in the shared tier, behind the readers' backs.

Each member has a queue and one task that empties it, at a limited rate: memcached drops blocks from
memory when they come faster than it writes them to its disk. All queues together hold a limited
number of bytes. What does not fit is dropped, because the block is in the local cache anyway.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import trio

from cachefs.shared import wire
from cachefs.shared.member import Member
from cachefs.shared.wire import Answer

_BYTES_PER_S = 100e6
"""For each member and node (docs/SHARED_TIER.md has the measurement)."""
_SLOW_BYTES_PER_S = 5e6
"""The same while the member is short of memory."""
_LEAST_PAUSE_S = 0.005
_MOST_BLOCKS, _MOST_BYTES = 16, 1 << 20
"""The most that one request stores."""
_LOOK_S = 1.0
"""How often a member is asked whether it is, while blocks are stored."""


class _Waiting(NamedTuple):
    key: bytes
    data: memoryview
    is_leased: bool


class _Queue:
    """The blocks that wait for one member, and how fast they are stored."""

    def __init__(self) -> None:
        self.waiting: deque[_Waiting] = deque()
        self.released: list[bytes] = []
        """Keys whose leases we don't need any more."""
        self.is_being_emptied = False
        self.bytes_per_s = _BYTES_PER_S
        self.looked_at = -math.inf


class Admissions:
    """The blocks that wait to be stored. Only the event loop uses it."""

    def __init__(self, most_bytes: int, on_answer: Callable[[Answer], None]) -> None:
        """`on_answer` gets what a member says of a block for which we had not asked before."""
        self.dropped_blocks = 0
        self._most_bytes = most_bytes
        self._on_answer = on_answer
        self._held_bytes = 0
        self._queues: WeakKeyDictionary[Member, _Queue] = WeakKeyDictionary()

    @property
    def is_idle(self) -> bool:
        """Whether no block waits or is being stored."""
        return not self._held_bytes

    def offer(
        self,
        nursery: trio.Nursery,
        member: Member,
        key: bytes,
        data: memoryview,
        is_leased: bool = True,
    ) -> None:
        """Queue a block for its member. `is_leased`: we have the lease. Otherwise the block is only
        stored if the member gives it to us."""
        if not member.is_usable:
            self.dropped_blocks += 1
            return
        queue = self._queues.setdefault(member, _Queue())
        if self._held_bytes + data.nbytes > self._most_bytes:
            self.dropped_blocks += 1
            if is_leased:  # otherwise other nodes would wait for us
                queue.released.append(key)
        else:
            self._held_bytes += data.nbytes
            queue.waiting.append(_Waiting(key, data, is_leased))
        if not queue.is_being_emptied:
            queue.is_being_emptied = True
            nursery.start_soon(self._empty, member, queue)

    async def _empty(self, member: Member, queue: _Queue) -> None:
        try:
            while (queue.waiting or queue.released) and member.is_usable:
                began_at = trio.current_time()
                await self._choose_pace(member, queue)
                released, queue.released = queue.released, []
                if released:
                    await member.delete(released)
                batch = _batch(queue.waiting)
                size_bytes = sum(waiting.data.nbytes for waiting in batch)
                try:
                    await self._store(member, batch)
                finally:
                    self._held_bytes -= size_bytes
                until = began_at + size_bytes / queue.bytes_per_s
                if until > trio.current_time() + _LEAST_PAUSE_S:
                    await trio.sleep_until(until)
        finally:
            self._held_bytes -= sum(waiting.data.nbytes for waiting in queue.waiting)
            self.dropped_blocks += len(queue.waiting)
            queue.waiting.clear()
            queue.released.clear()
            queue.is_being_emptied = False

    async def _choose_pace(self, member: Member, queue: _Queue) -> None:
        now = trio.current_time()
        if now >= queue.looked_at + _LOOK_S:
            queue.looked_at = now
            is_short = await member.is_short_of_memory()
            queue.bytes_per_s = _SLOW_BYTES_PER_S if is_short else _BYTES_PER_S

    async def _store(self, member: Member, batch: list[_Waiting]) -> None:
        unleased = [waiting for waiting in batch if not waiting.is_leased]
        if unleased:
            refused = await self._without_lease(member, unleased)
            batch = [waiting for waiting in batch if waiting.key not in refused]
        if batch:
            stored = await member.store([(waiting.key, waiting.data) for waiting in batch])
            self.dropped_blocks += len(batch) - stored

    async def _without_lease(self, member: Member, batch: list[_Waiting]) -> set[bytes]:
        """Ask for the leases of blocks. Return the keys of those that we don't get."""
        asked = {waiting.key: Answer.DROPPED for waiting in batch}
        for _ in range(2):  # a block that was dropped gives its lease to the second question
            keys = [key for key, answer in asked.items() if answer is Answer.DROPPED]
            heads = await member.heads([wire.lease(key) for key in keys]) if keys else []
            if heads is None:
                break
            asked |= {key: head.answer for key, head in zip(keys, heads, strict=True)}
        for answer in asked.values():
            self._on_answer(answer)
        return {key for key, answer in asked.items() if answer is not Answer.LEASED}


def _batch(waiting: deque[_Waiting]) -> list[_Waiting]:
    """Take the next blocks for one request."""
    batch: list[_Waiting] = []
    size_bytes = 0
    while waiting and len(batch) < _MOST_BLOCKS:
        size_bytes += waiting[0].data.nbytes
        if batch and size_bytes > _MOST_BYTES:
            break
        batch.append(waiting.popleft())
    return batch
