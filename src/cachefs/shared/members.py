"""`Members`: the members of the shared tier, which of them has which block, and which are out."""

import logging
from collections.abc import Iterator

import trio

from cachefs.config.address import OFF
from cachefs.format.shared_value import SharedFormat
from cachefs.shared.discovery import NOBODY, FoundMember, find_members
from cachefs.shared.member import Member, MemberCounters, Traffic
from cachefs.shared.ring import Ring

log = logging.getLogger(__name__)

_READ_AGAIN_S = 10.0
"""How often the file or the DNS name of the members is read again."""
_TICK_S = 0.25
_REPLACED_S = 30.0
"""The blocks of a member that is out for so long go to other members."""


class Members:
    """The present members. Only the event loop may use it. They change while `run` runs, and never
    between two awaits of another task that does not wait."""

    def __init__(self, shared_format: SharedFormat, timeout_s: float) -> None:
        self.option = OFF
        """Where the members are named: the checked value of `--shared`."""
        self.problem: str | None = None
        """Why members could not be found; None if they were."""
        self.are_most_out = False
        """Whether more than half of the members are out."""
        self._format = shared_format
        self._timeout_s = timeout_s
        self._traffic = Traffic()
        self._members: dict[str, Member] = {}
        self._ring = Ring(())
        self._option_changed = trio.Event()
        self._search = trio.CancelScope()
        self._departed = MemberCounters()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """All members, by address."""
        return iter([self._members[address] for address in sorted(self._members)])

    def owner(self, group: int) -> Member | None:
        """Return the member for a group of blocks; None if there is none."""
        address = self._ring.owner(group)
        return None if address is None else self._members.get(address)

    def shares(self) -> dict[str, float]:
        """Return the share of the blocks that each member has now, by address."""
        return self._ring.shares()

    def totals(self) -> MemberCounters:
        """Return the sums over all members, those that have left included."""
        totals = MemberCounters()
        for counters in (self._departed, *(member.counters for member in self._members.values())):
            totals.add(counters)
        return totals

    def use(self, option: str) -> None:
        """Take the members from another source: any checked value of `--shared`."""
        self.option = option
        self._option_changed.set()
        self._search.cancel()

    async def run(self) -> None:
        """Find the members, and probe those that are out, until it is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._probe_members)
                while True:
                    self._option_changed = trio.Event()
                    with trio.CancelScope() as self._search:
                        await self._find()
                    with trio.move_on_after(_READ_AGAIN_S):
                        await self._option_changed.wait()
        finally:
            for member in self._members.values():
                member.close()

    async def _find(self) -> None:
        """Find the members again. If their file or DNS name can't be read now, they stay."""
        found = NOBODY if self.option == OFF else await find_members(self.option)
        if found.problem is not None and found.problem != self.problem:
            log.warning("shared tier: %s", found.problem)
        self.problem = found.problem
        if found.members is not None:
            self._replace(found.members)

    def _replace(self, found: tuple[FoundMember, ...]) -> None:
        before = self._members
        members = {each.address: self._member_at(each) for each in found}
        self._members = {address: member for address, member in members.items() if member}
        for member in before.values():
            if self._members.get(member.address) is not member:
                self._departed.add(member.counters)
                member.close()
        self._count_out()
        self._renew_ring()

    def _member_at(self, found: FoundMember) -> Member | None:
        """Return the member that is there already, or a new one if its IP address is another one
        now. While a name can't be resolved, its member stays."""
        member, host = self._members.get(found.address), found.host
        if host is None or (member is not None and member.is_at(host, found.port)):
            return member
        return Member(
            found.address,
            host,
            found.port,
            self._format,
            self._timeout_s,
            self._traffic,
            self._count_out,
        )

    def _count_out(self) -> None:
        out = sum(member.is_out for member in self._members.values())
        self.are_most_out = 2 * out > len(self._members)

    def _renew_ring(self) -> None:
        """Give the blocks of members that have been out for long to others, and back."""
        now = trio.current_time()
        used = [
            member.address
            for member in self._members.values()
            if member.out_since is None or now < member.out_since + _REPLACED_S
        ]
        ring = Ring(used or tuple(self._members))
        if ring.members != self._ring.members:
            self._ring = ring
            log.debug("shared tier: %d members have blocks", len(ring.members))

    async def _probe_members(self) -> None:
        while True:
            await trio.sleep(_TICK_S)
            out = [member for member in self._members.values() if member.is_out]
            if out or len(self._ring.members) < len(self._members):
                async with trio.open_nursery() as nursery:
                    for member in out:
                        nursery.start_soon(member.probe)
                self._renew_ring()
