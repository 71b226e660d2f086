"""Which member has which block: the same on all nodes, evenly, and with few moves."""

import random
from collections import Counter

from cachefs.shared.ring import Ring

MEMBERS = [f"10.0.0.{number}:11211" for number in range(1, 11)]
_CHANCE = random.Random(7)
GROUPS = [_CHANCE.getrandbits(64) for _ in range(5000)]


def owners(members: list[str]) -> list[str | None]:
    ring = Ring(members)
    return [ring.owner(group) for group in GROUPS]


def test_golden_owners() -> None:
    """All nodes must agree, whatever version they have."""
    ring = Ring(["a:1", "b:1", "c:1"])
    assert [ring.owner(group) for group in (0, 1, 2, 3, 65535, 1 << 63)] == [
        "b:1",
        "a:1",
        "c:1",
        "a:1",
        "b:1",
        "b:1",
    ]


def test_order_and_repetition_do_not_matter() -> None:
    assert owners(MEMBERS) == owners([*reversed(MEMBERS), MEMBERS[3]])


def test_members_have_equal_shares() -> None:
    counts = Counter(owners(MEMBERS))
    assert set(counts) == set(MEMBERS)
    assert all(400 < count < 600 for count in counts.values())
    shares = Ring(MEMBERS).shares()
    assert abs(sum(shares.values()) - 1) < 1e-9
    assert all(0.08 < share < 0.12 for share in shares.values())


def test_only_the_blocks_of_a_lost_member_move() -> None:
    lost = MEMBERS[4]
    before, after = owners(MEMBERS), owners([each for each in MEMBERS if each != lost])
    assert all(new == old for old, new in zip(before, after, strict=True) if old != lost)
    heirs = Counter(new for old, new in zip(before, after, strict=True) if old == lost)
    assert len(heirs) == len(MEMBERS) - 1


def test_nobody_is_asked_without_members() -> None:
    assert Ring([]).owner(5) is None
    assert Ring([]).shares() == {}
