"""Which tier a block belongs in."""

import random

from cachefs.cache.levels.placement import Placement, TierPlace, promotes
from cachefs.cache.tier.cooldown import COOLDOWN_S, Cooldown
from cachefs.types import BlockKey

KEYS = [BlockKey(random.Random(n).randbytes(16), n % 3) for n in range(4000)]
MEM, SSD_A, SSD_B, HDD = range(4)
LEVELS = Placement(
    [
        TierPlace(b"m", 10, 0),
        TierPlace(b"a", 100, 1),
        TierPlace(b"b", 100, 1),
        TierPlace(b"h", 9, 2),
    ]
)


def always(_number: int) -> bool:
    return True


def only(*numbers: int):
    return lambda number: number in numbers


def one_level(*places: tuple[bytes, int]) -> Placement:
    return Placement([TierPlace(name, weight, 0) for name, weight in places])


def test_homes_follow_the_weights_and_move_little() -> None:
    two = one_level((b"a", 100), (b"b", 300))
    homes = [two.order(key)[0] for key in KEYS]
    assert 0.22 < homes.count(0) / len(KEYS) < 0.28
    assert all(sorted(two.order(key)) == [0, 1] for key in KEYS[:50])
    three = one_level((b"a", 100), (b"b", 300), (b"c", 400))
    moved = [three.order(key)[0] for key in KEYS]
    assert all(new in (old, 2) for old, new in zip(homes, moved, strict=True))
    assert 0.46 < moved.count(2) / len(KEYS) < 0.54


def test_no_tiers_at_all() -> None:
    assert Placement([]).order(KEYS[0]) == []
    assert Placement([]).entry(KEYS[0], always, always) is None


def test_look_ups_go_from_the_fastest_level_to_the_slowest() -> None:
    for key in KEYS[:50]:
        order = LEVELS.order(key)
        assert order[0] == MEM
        assert set(order[1:3]) == {SSD_A, SSD_B}
        assert order[3] == HDD
        assert order[1] == LEVELS.home(key, 1, always)


def test_a_block_enters_the_fastest_level_with_room() -> None:
    for key in KEYS[:50]:
        assert LEVELS.entry(key, always, always) == MEM
        assert LEVELS.entry(key, always, only(SSD_A, SSD_B, HDD)) == LEVELS.order(key)[1]
        assert LEVELS.entry(key, always, only(HDD)) == HDD
        assert LEVELS.entry(key, always, only()) is None
        # A full home is no reason to go to another path of the same level.
        other = LEVELS.order(key)[2]
        assert LEVELS.entry(key, always, only(other, HDD)) == HDD


def test_a_path_out_of_use_hands_its_blocks_to_the_others() -> None:
    for key in KEYS[:50]:
        assert LEVELS.entry(key, only(SSD_B, HDD), always) == SSD_B
        assert LEVELS.home(key, 1, only(SSD_A)) == SSD_A
        assert LEVELS.home(key, 1, only(HDD)) is None


def test_a_block_goes_down_only() -> None:
    for key in KEYS[:50]:
        assert LEVELS.entry(key, always, always, first_level=1) == LEVELS.order(key)[1]
        assert LEVELS.entry(key, always, always, first_level=2) == HDD
        assert LEVELS.entry(key, always, always, first_level=3) is None


def test_promotion() -> None:
    assert promotes(age=10_000, oldest_age_above=1, room_above=True)
    assert promotes(age=24, oldest_age_above=100, room_above=False)
    assert not promotes(age=25, oldest_age_above=100, room_above=False)


def test_blocks_rest_for_a_second() -> None:
    cooldown = Cooldown()
    cooldown.begin(KEYS[0], 5.0)
    cooldown.begin(KEYS[1], 5.5)
    assert KEYS[0] in cooldown
    cooldown.begin(KEYS[0], 5.9)
    cooldown.expire(5.0 + COOLDOWN_S)
    assert KEYS[0] in cooldown
    cooldown.expire(5.9 + COOLDOWN_S)
    assert KEYS[0] not in cooldown
    assert KEYS[1] not in cooldown
    assert not cooldown._queue
