"""Stores fetched blocks in the shared tier, behind the readers' backs.

Each member has a queue and one task that empties it, at a limited rate: memcached drops blocks from
memory when they come faster than it writes them to its disk. All queues together hold a limited
number of bytes. What does not fit is dropped, because the block is in the local cache anyway.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

from cachefs.shared import wire
from cachefs.shared.member import Member
from cachefs.shared.wire import Answer

_STORED_BYTES_PER_S = 100e6
"""For each member and node (docs/SHARED_TIER.md has the measurement)."""


class _Waiting(NamedTuple):
    key: bytes
    data: memoryview
    is_leased: bool


class Admissions:
    """The blocks that wait to be stored. Only the event loop uses it."""

    def __init__(self, most_bytes: int, on_answer: Callable[[Answer], None]) -> None:
        """`on_answer` gets what a member says of a block for which we had not asked before."""
        self.dropped_blocks = 0
        self._most_bytes = most_bytes
        self._on_answer = on_answer
        self._held_bytes = 0
        self._queues: dict[Member, deque[_Waiting]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no block waits or is being stored."""
        return not self._queues

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
        if member.is_out or self._held_bytes + data.nbytes > self._most_bytes:
            self.dropped_blocks += 1
            return
        self._held_bytes += data.nbytes
        queue = self._queues.get(member)
        if queue is None:
            self._queues[member] = queue = deque()
            nursery.start_soon(self._store_all, member, queue)
        queue.append(_Waiting(key, data, is_leased))

    async def _store_all(self, member: Member, queue: deque[_Waiting]) -> None:
        try:
            while queue:
                began_at = trio.current_time()
                waiting = queue[0]
                await self._store(member, waiting)
                self._held_bytes -= queue.popleft().data.nbytes
                await trio.sleep_until(began_at + waiting.data.nbytes / _STORED_BYTES_PER_S)
        finally:
            self._held_bytes -= sum(waiting.data.nbytes for waiting in queue)
            del self._queues[member]

    async def _store(self, member: Member, waiting: _Waiting) -> None:
        if not waiting.is_leased:
            answer = Answer.DROPPED
            while answer is Answer.DROPPED:
                heads = await member.heads([wire.lease(waiting.key)])
                answer = Answer.MISSED if heads is None else heads[0].answer
            self._on_answer(answer)
            if answer is not Answer.LEASED:
                return
        if not await member.store(waiting.key, waiting.data):
            self.dropped_blocks += 1
