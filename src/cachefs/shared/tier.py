"""`SharedTier`: the cache tier that nodes share, between the in-flight fetches and the origin.

`read` and `read_many` return bytes as the origin does. They first ask the members for the blocks,
and ask the origin only for those that no member has. What the origin has sent is then stored in the
shared tier, by the node that has the lease of the block. The other nodes wait for a moment until it
has done so.

No failure of the shared tier is an error of a read: it is a miss.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from cachefs.format.shared_value import ObjectName, SharedFormat, hash_share
from cachefs.shared import wire
from cachefs.shared.admission import Admissions
from cachefs.shared.connection import AskedBlock
from cachefs.shared.demand import Demand
from cachefs.shared.member import Member
from cachefs.shared.members import Members
from cachefs.shared.wire import Answer
from cachefs.types import BLOCK_BYTES, BlockKey, ObjectRef

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 0.02
_COMPUTE_S = 10.0
"""How often the share of the blocks that is kept is computed again."""
_MOST_WAIT_S = 0.25
"""How long a node waits at most for the node that has the lease, without its last question."""
_LEAST_WAIT_S = 0.1
"""A node that has much to do may take longer than twice the usual time of the origin."""
_POLL_LEAST_S, _POLL_MOST_S = 0.002, 0.02
_ADMISSION_BYTES = 64 << 20
_SLOW_ASKED = 32
_SLOWER = 1.5
"""The shared tier is bypassed if it takes so many times as long as the origin."""
_OURS = (Answer.LEASED, Answer.BAD, Answer.MISSED)
"""A member that has not answered in time may have given us the lease, so nobody else would store
the block. If it has not, the block is stored twice, which does no harm."""
_FIRST_BYPASS_S, _MOST_BYPASS_S = 1.0, 30.0
_SMOOTHING = 1 / 16
_KNOWN_S = 60.0
_MOST_LEASES = 4096

Fetch = Callable[[int, int], Awaitable[memoryview]]
"""Gets `length` bytes at `offset` of one object from the origin."""
FetchMany = Callable[[Sequence[ObjectRef]], Awaitable[list[memoryview | None]]]
"""Gets whole objects from the origin; None for one that it has not got."""


@dataclass(slots=True)
class SharedCounters:
    """Counters of the shared tier as this node sees it, in blocks."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    waited: int = 0
    """Blocks that another node was fetching when we asked."""
    bypasses: int = 0
    """How often it was bypassed because it was slower than the origin."""


class _Average:
    """A moving average. It is unknown if the last value is older than `_KNOWN_S`."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._noted_at = -math.inf

    @property
    def value(self) -> float | None:
        return self._value if trio.current_time() < self._noted_at + _KNOWN_S else None

    def note(self, value: float) -> None:
        before = self.value
        self._value = value if before is None else before + _SMOOTHING * (value - before)
        self._noted_at = trio.current_time()


class _Bytes:
    """The bytes of a run of blocks; the memory is taken when the first of them come."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._data: memoryview | None = None

    def part(self, offset: int, length: int) -> memoryview:
        if self._data is None:
            self._data = memoryview(bytearray(self.length))
        return self._data[offset : offset + length]


class SharedTier:
    """The shared tier of one mount. It is used while `run` runs; without members nothing is
    asked. Only the event loop may use it."""

    def __init__(
        self,
        identity: str,
        secret: bytes = b"",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        obstacle: str | None = None,
    ) -> None:
        """`identity` is that of the origin. An empty `secret` means none. `timeout_s` is how long a
        reader waits for a member at most. `obstacle` is why the shared tier can't be used, if
        so."""
        self._obstacle = obstacle
        self.counters = SharedCounters()
        self.demand = Demand()
        self._identity = identity
        self._format = SharedFormat(secret)
        self.members = Members(self._format, timeout_s)
        self._never_slow_s = timeout_s / 4
        """A shared tier that answers sooner never counts as slow, whatever the origin needs."""
        self._admissions = Admissions(_ADMISSION_BYTES, self._note_answer)
        self._nursery: trio.Nursery | None = None
        self._origin_s = _Average()
        self._ask_s = _Average()
        self._hit_ratio = _Average()
        self._leases: dict[bytes, float] = {}
        """Keys whose lease this node has and has not used yet, and when it ends."""
        self._asked_count = 0
        self._bypass_s = 0.0
        self._bypassed_until = -math.inf

    # -- state ---------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether blocks are asked for in the shared tier now."""
        if self._nursery is None or self._obstacle is not None:
            return False
        return len(self.members) > 0 and not self.is_bypassed

    @property
    def problem(self) -> str | None:
        """Why it can't be used, or what is wrong with its members; None if nothing is."""
        return self._obstacle or self.members.problem

    @property
    def is_bypassed(self) -> bool:
        """Whether all reads go around it: more than half of its members are out, or it is slower
        than the origin."""
        return self.members.are_most_out or trio.current_time() < self._bypassed_until

    @property
    def serves_most(self) -> bool:
        """Whether it has had most of the blocks that were asked for lately."""
        return self.is_on and (self._hit_ratio.value or 0.0) >= 0.5

    @property
    def dropped_blocks(self) -> int:
        """Number of blocks that were not stored, as too many came at a time, or a member refused
        them."""
        return self._admissions.dropped_blocks

    # -- life ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run `members`, and store blocks, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            nursery.start_soon(self._compute_share)
            try:
                await self.members.run()
            finally:
                self._nursery = None

    async def stored(self) -> None:
        """Wait until no block waits to be stored."""
        while not self._admissions.is_idle:  # noqa: ASYNC110 - only tests and the end wait
            await trio.sleep(_POLL_MOST_S)

    async def _compute_share(self) -> None:
        while True:
            await self.demand.compute()
            await trio.sleep(_COMPUTE_S)

    # -- reads ---------------------------------------------------------------------------------

    async def read(
        self, ref: ObjectRef, first_block: int, block_count: int, fetch: Fetch
    ) -> memoryview:
        """Return a run of blocks. `fetch` gets from the origin what no member has. Raises what
        `fetch` raises."""
        start = first_block * BLOCK_BYTES
        last = first_block + block_count - 1
        length = last * BLOCK_BYTES + ref.block_length(last) - start
        name = self._name(ref)
        run = _Bytes(length)
        asked = [
            self._asked(ref, name, index, partial(run.part, index * BLOCK_BYTES - start))
            for index in range(first_block, last + 1)
        ]
        await self._ask_owners([block for block in asked if self._is_kept(ref, block)])
        for block in asked:
            self._count(block)
        if all(block.answer is Answer.HIT for block in asked):
            return run.part(0, length)
        if not any(block.answer in (Answer.HIT, Answer.HELD) for block in asked):
            data = await fetch(start, length)
            for block in asked:
                at = block.block_index * BLOCK_BYTES - start
                self._admit(block, data[at : at + block.length])
            return data
        await self._fetch_missing(asked, start, run, fetch, but_held=True)
        await self._wait_for_holders(asked)
        await self._fetch_missing(asked, start, run, fetch)
        return run.part(0, length)

    async def read_many(
        self, refs: Sequence[ObjectRef], fetch_many: FetchMany
    ) -> list[memoryview | None]:
        """Return whole objects of one block each. `fetch_many` gets those that no member has. The
        result has None for an object that neither has, or that another node is fetching."""
        asked = [self._only_block(ref) for ref in refs]
        kept = zip(refs, asked, strict=True)
        await self._ask_owners([block for ref, block in kept if self._is_kept(ref, block)])
        for block in asked:
            self._count(block)
        missing = [n for n, block in enumerate(asked) if block.data is None]
        missing = [n for n in missing if asked[n].answer is not Answer.HELD]
        if missing:
            fetched = await fetch_many([refs[n] for n in missing])
            for n, data in zip(missing, fetched, strict=True):
                if data is not None and data.nbytes == asked[n].length:
                    self._admit(asked[n], data)
                    asked[n].data = data
        return [block.data for block in asked]

    def put(self, ref: ObjectRef, data: memoryview) -> None:
        """Store a file of one block that has come from the origin, and that the members were not
        asked for."""
        nursery = self._nursery
        if nursery is None or not self.is_on:
            return
        block = self._only_block(ref)
        member = self.members.owner(block.group)
        if member is not None and self._is_kept(ref, block):
            self._admissions.offer(nursery, member, block.key, data, is_leased=False)

    async def count_blocks(self, ref: ObjectRef, most: int) -> int | None:
        """Return how many of the first `most` blocks the members have; None if one of them does not
        answer."""
        name, found = self._name(ref), 0
        commands: dict[Member, list[bytes]] = defaultdict(list)
        for index in range(min(ref.block_count, most)):
            member = self.members.owner(name.group(index))
            if member is None:
                return None
            commands[member].append(wire.peek(self._format.key(name, index)))
        for member, own in commands.items():
            heads = await member.heads(own)
            if heads is None:
                return None
            found += sum(head.answer is Answer.HIT for head in heads)
        return found

    # -- parts of reads ------------------------------------------------------------------------

    def _name(self, ref: ObjectRef) -> ObjectName:
        return self._format.name(self._identity, ref.path, ref.meta.version)

    def _asked(
        self,
        ref: ObjectRef,
        name: ObjectName,
        block_index: int,
        part: Callable[[int], memoryview],
    ) -> AskedBlock:
        length = ref.block_length(block_index)
        key, group = self._format.key(name, block_index), name.group(block_index)
        return AskedBlock(key, group, block_index, length, partial(part, length))

    def _only_block(self, ref: ObjectRef) -> AskedBlock:
        """Return the block of a file that has one."""
        return self._asked(ref, self._name(ref), 0, partial(_Bytes(ref.block_length(0)).part, 0))

    def _is_kept(self, ref: ObjectRef, block: AskedBlock) -> bool:
        """Whether the shared tier keeps this block. It does not if it is smaller than the data and
        the block has a hash above the limit."""
        demand = self.demand
        if not demand.limit_bytes:
            return True
        hashed = hash_share(block.key)
        key = BlockKey(ref.object_id, block.block_index)
        demand.note(key, hashed, block.length, trio.current_time())
        if hashed < demand.share:
            return True
        block.answer = Answer.LEFT_OUT
        return False

    async def _ask_owners(self, asked: Iterable[AskedBlock]) -> None:
        by_member: dict[Member, list[AskedBlock]] = defaultdict(list)
        for block in asked:
            member = self.members.owner(block.group)
            if member is not None:
                by_member[member].append(block)
        await self._ask(by_member)

    async def _ask(self, by_member: dict[Member, list[AskedBlock]]) -> None:
        """Ask the members for their blocks, all members at the same time."""
        began_at = trio.current_time()
        if len(by_member) == 1:
            for member, asked in by_member.items():
                await member.ask(asked)
        elif by_member:
            async with trio.open_nursery() as nursery:
                for member, asked in by_member.items():
                    nursery.start_soon(member.ask, asked)
        took_s = trio.current_time() - began_at
        for asked in by_member.values():
            self._note_leases(asked)
            self._ask_s.note(took_s / max(1.0, sum(block.length for block in asked) / BLOCK_BYTES))
        self._asked_count += len(by_member)
        if self._asked_count >= _SLOW_ASKED:
            self._bypass_if_slow()

    def _note_leases(self, asked: list[AskedBlock]) -> None:
        """Remember our own leases: if a GET fails, the next reader need not wait for ourselves."""
        now = trio.current_time()
        for block in asked:
            if block.answer is Answer.LEASED:
                self._leases[block.key] = now + wire.LEASE_S
            elif block.answer is Answer.HELD and self._leases.get(block.key, now) > now:
                block.answer = Answer.LEASED
        if len(self._leases) > _MOST_LEASES:
            self._leases = {key: until for key, until in self._leases.items() if until > now}

    def _count(self, block: AskedBlock) -> None:
        self._note_answer(block.answer)
        if block.answer is Answer.HIT:
            self.counters.hits += 1
            self.counters.hit_bytes += block.length
        elif block.answer is Answer.HELD:
            self.counters.waited += 1
        else:
            self.counters.misses += 1

    def _note_answer(self, answer: Answer) -> None:
        self._hit_ratio.note(float(answer in (Answer.HIT, Answer.HELD)))

    def _bypass_if_slow(self) -> None:
        """Bypass the shared tier for a while if it takes longer than the origin."""
        self._asked_count = 0
        ask_s, origin_s = self._ask_s.value, self._origin_s.value
        if (
            ask_s is None
            or origin_s is None
            or ask_s <= max(_SLOWER * origin_s, self._never_slow_s)
        ):
            self._bypass_s = 0.0
            return
        self._bypass_s = min(max(2 * self._bypass_s, _FIRST_BYPASS_S), _MOST_BYPASS_S)
        self._bypassed_until = trio.current_time() + self._bypass_s
        self._ask_s = _Average()
        self.counters.bypasses += 1
        log.info(
            "the shared tier is bypassed for %.0f s: it takes %.0f ms, and the origin %.0f ms",
            self._bypass_s,
            1e3 * ask_s,
            1e3 * origin_s,
        )

    def note_origin(self, took_s: float, length: int) -> None:
        """Note how long the origin has taken for one request."""
        self._origin_s.note(took_s / max(1.0, length / BLOCK_BYTES))

    async def _fetch_missing(
        self,
        asked: list[AskedBlock],
        start: int,
        run: _Bytes,
        fetch: Fetch,
        but_held: bool = False,
    ) -> None:
        """Fetch the blocks that have not come, each run of them with one request. With `but_held`,
        leave out those that another node is fetching."""
        skipped = (Answer.HIT, Answer.HELD) if but_held else (Answer.HIT,)
        missing: list[list[AskedBlock]] = [[]]
        for block in asked:
            if block.answer not in skipped:
                missing[-1].append(block)
            elif missing[-1]:
                missing.append([])

        failures: list[Exception] = []

        async def fetch_run(some: list[AskedBlock]) -> None:
            offset = some[0].block_index * BLOCK_BYTES
            length = sum(block.length for block in some)
            try:
                data = await fetch(offset, length)
            except Exception as error:  # raised below: a nursery would wrap it into a group
                failures.append(error)
                return
            run.part(offset - start, length)[:] = data
            for block in some:
                at = block.block_index * BLOCK_BYTES
                self._admit(block, data[at - offset : at - offset + block.length])
                block.answer = Answer.HIT

        async with trio.open_nursery() as nursery:
            for some in filter(None, missing):
                nursery.start_soon(fetch_run, some)
        if failures:
            raise failures[0]

    async def _wait_for_holders(self, asked: list[AskedBlock]) -> None:
        """Ask again and again for blocks that other nodes are fetching, for a limited time."""
        origin_s = self._origin_s.value
        wait_s = _MOST_WAIT_S
        if origin_s is not None:
            wait_s = min(max(2 * origin_s, _LEAST_WAIT_S), _MOST_WAIT_S)
        pause_s = min(max(wait_s / 20, _POLL_LEAST_S), _POLL_MOST_S)
        until = trio.current_time() + wait_s
        while held := [block for block in asked if block.answer is Answer.HELD]:
            if trio.current_time() >= until:
                return
            await trio.sleep(pause_s)
            await self._ask_owners(held)
            for block in held:
                if block.answer is Answer.HIT:
                    self.counters.hits += 1
                    self.counters.hit_bytes += block.length

    def _admit(self, block: AskedBlock, data: memoryview) -> None:
        """Store a block that has come from the origin, if nobody else does."""
        self._leases.pop(block.key, None)
        if block.answer in _OURS and self._nursery is not None:
            member = self.members.owner(block.group)
            if member is not None:
                if self.demand.share < 1:  # else the slice keeps the neighbours in memory, too
                    data = memoryview(bytes(data))
                self._admissions.offer(self._nursery, member, block.key, data)
