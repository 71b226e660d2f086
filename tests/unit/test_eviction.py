"""Which blocks a policy gives up."""

import random

import pytest

from cachefs.cache.eviction import LruPolicy, NoEviction, make_policy
from cachefs.cache.placement import Placement
from cachefs.format.slab import class_of
from cachefs.tiers.slabs import Slab, SlabSet
from cachefs.types import BlockKey

KEY = BlockKey(bytes(16), 0)


def filled(policy: LruPolicy, slab_count: int, length: int) -> tuple[SlabSet, list[Slab]]:
    slabs = SlabSet(4 << 20, slab_count)
    for number in range(slab_count):
        slab = slabs.add(number)
        slabs.reformat(slab, class_of(length), policy.clock)
        for _ in range(slab.slot_count):
            slot = slabs.allocate(slab)
            slabs.commit(slab, slot, length, 1)
            policy.on_admit(slab, slot)
    return slabs, list(slabs.by_id.values())


def chosen(policy: LruPolicy, slabs: list[Slab], fraction: float) -> set[tuple[int, int]]:
    plan = policy.plan(slabs, fraction)
    assert plan is not None
    return {
        (slab.slab_id, slot)
        for slab in slabs
        for slot in policy.victims(slab, plan, 0, slab.slot_count)
    }


@pytest.mark.parametrize("clock", [0, 2**32 - 400])
def test_lru_is_exact_for_few_blocks_even_when_the_clock_wraps(clock: int) -> None:
    policy = LruPolicy(clock, seed=1)
    _, slabs = filled(policy, 10, 90_000)
    order = [(slab.slab_id, slot) for slab in slabs for slot in slab.used_slots()]
    random.Random(2).shuffle(order)
    for slab_id, slot in order:
        policy.on_hit(slabs[slab_id], slot)
    for count in (1, 17, 200):
        assert chosen(policy, slabs, count / len(order)) == set(order[:count])


def test_lru_is_close_for_many_blocks() -> None:
    policy = LruPolicy(seed=3)
    _, slabs = filled(policy, 10, 2_000)
    order = [(slab.slab_id, slot) for slab in slabs for slot in slab.used_slots()]
    assert len(order) > 15_000
    random.Random(2).shuffle(order)
    for slab_id, slot in order:
        policy.on_hit(slabs[slab_id], slot)
    victims = chosen(policy, slabs, 0.2)
    assert 0.15 < len(victims) / len(order) < 0.25
    assert victims == set(order[: len(victims)])


def test_slabs_restored_from_rows_keep_their_place() -> None:
    policy = LruPolicy(seed=3)
    slabs, all_slabs = filled(policy, 3, 90_000)
    for slot in all_slabs[0].used_slots():
        policy.on_hit(all_slabs[0], slot)
    restored = SlabSet(slabs.slab_bytes, 3)
    again = [restored.add(slab.slab_id, slab.row()) for slab in all_slabs]
    later = LruPolicy(max(slab.tick for slab in again))
    assert {slab_id for slab_id, _ in chosen(later, again, 0.3)} == {1}


def test_the_coldest_slab_is_worth_least() -> None:
    policy = LruPolicy(seed=1)
    _, slabs = filled(policy, 3, 90_000)
    for slab in (slabs[2], slabs[0]):
        for slot in slab.used_slots():
            policy.on_hit(slab, slot)
    assert min(slabs, key=policy.worth) is slabs[1]
    empty = SlabSet(4 << 20, 1).add(0)
    assert policy.worth(empty) == 0


def test_none_admits_only_into_free_space() -> None:
    policy = NoEviction()
    _, slabs = filled(policy, 1, 90_000)
    assert policy.plan(slabs, 0.5) is None
    assert policy.admits(KEY, 1, must_replace=False)
    assert not policy.admits(KEY, 1, must_replace=True)
    assert not policy.evicts


def test_names() -> None:
    assert make_policy("lru").name == "lru"
    assert make_policy("none").name == "none"
    assert LruPolicy().plan([], 0.5) is None


def test_placement_follows_the_weights_and_moves_little() -> None:
    keys = [BlockKey(random.Random(n).randbytes(16), n % 3) for n in range(4000)]
    two = Placement([b"a", b"b"], [100, 300])
    homes = [two.order(key)[0] for key in keys]
    assert 0.22 < homes.count(0) / len(keys) < 0.28
    assert all(sorted(two.order(key)) == [0, 1] for key in keys[:50])
    three = Placement([b"a", b"b", b"c"], [100, 300, 400])
    moved = [three.order(key)[0] for key in keys]
    assert all(new in (old, 2) for old, new in zip(homes, moved, strict=True))
    assert 0.46 < moved.count(2) / len(keys) < 0.54
    assert Placement([], []).order(keys[0]) == []
