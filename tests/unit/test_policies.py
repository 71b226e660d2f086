"""Which blocks a policy gives up."""

import random

import pytest

from cachefs.cache.policies import POLICIES, History, make_history, make_policy
from cachefs.cache.policies.base import EvictionPolicy
from cachefs.cache.policies.epoch import EpochPolicy, ReuseHistory
from cachefs.cache.policies.sieve import SievePolicy
from cachefs.cache.policies.simple import LruPolicy, TwoRandomPolicy
from cachefs.cache_dir.slab import Slab
from cachefs.cache_dir.slabs import SlabSet
from cachefs.format.slab import class_of
from cachefs.types import BlockKey


def history_at(now: int) -> History:
    history = History()
    history.now = now
    return history


def key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(16), 0)


def filled(policy: EvictionPolicy, slab_count: int, length: int) -> tuple[SlabSet, list[Slab]]:
    slabs = SlabSet(4 << 20, slab_count)
    for number in range(slab_count):
        slab = slabs.add(number)
        slabs.reformat(slab, class_of(length), policy.now)
        for _ in range(slab.slot_count):
            slot = slabs.allocate(slab)
            slabs.commit(slab, slot, length, 1)
            policy._history.on_miss(key(0))
            policy.on_admit(slab, slot, 0)
    return slabs, list(slabs.by_id.values())


def chosen(policy: EvictionPolicy, slabs: list[Slab], fraction: float) -> set[tuple[int, int]]:
    plan = policy.plan(slabs, fraction)
    assert plan is not None
    return {
        (slab.slab_id, slot)
        for slab in slabs
        for slot in policy.victims(slab, plan, 0, slab.slot_count)
    }


@pytest.mark.parametrize("clock", [0, 2**32 - 400])
def test_lru_is_exact_for_few_blocks_even_when_the_clock_wraps(clock: int) -> None:
    policy = LruPolicy(history_at(clock), seed=1)
    _, slabs = filled(policy, 10, 90_000)
    order = [(slab.slab_id, slot) for slab in slabs for slot in slab.used_slots()]
    random.Random(2).shuffle(order)
    for slab_id, slot in order:
        policy.on_hit(slabs[slab_id], slot)
    for count in (1, 17, 200):
        assert chosen(policy, slabs, count / len(order)) == set(order[:count])


def test_lru_is_close_for_many_blocks() -> None:
    policy = LruPolicy(History(), seed=3)
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
    policy = LruPolicy(History(), seed=3)
    slabs, all_slabs = filled(policy, 3, 90_000)
    for slot in all_slabs[0].used_slots():
        policy.on_hit(all_slabs[0], slot)
    restored = SlabSet(slabs.slab_bytes, 3)
    again = [restored.add(slab.slab_id, slab.row()) for slab in all_slabs]
    later = LruPolicy(History())
    later.resume(max(slab.tick for slab in again))
    assert {slab_id for slab_id, _ in chosen(later, again, 0.3)} == {1}


def test_the_coldest_slab_is_worth_least() -> None:
    policy = LruPolicy(History(), seed=1)
    _, slabs = filled(policy, 3, 90_000)
    for slab in (slabs[2], slabs[0]):
        for slot in slab.used_slots():
            policy.on_hit(slab, slot)
    assert min(slabs, key=policy.worth) is slabs[1]
    empty = SlabSet(4 << 20, 1).add(0)
    assert policy.worth(empty) == 0


def test_none_gives_up_nothing() -> None:
    policy = make_policy("none", History())
    _, slabs = filled(policy, 1, 90_000)
    assert policy.plan(slabs, 0.5) is None
    assert not policy.replaces
    assert not policy.may_empty(slabs[0])


@pytest.mark.parametrize("name", POLICIES)
def test_all_policies_stand_an_empty_tier_and_a_full_one(name: str) -> None:
    policy = make_policy(name, make_history(name))
    assert policy.name == name
    assert policy.plan([], 0.5) is None
    assert policy.oldest_age([]) == 0
    _, slabs = filled(policy, 2, 90_000)
    for slot in slabs[0].used_slots():
        policy.on_hit(slabs[0], slot)
    plan = policy.plan(slabs, 0.25)
    if plan is not None:
        victims = policy.victims(slabs[1], plan, 0, slabs[1].slot_count)
        assert set(victims) <= set(slabs[1].used_slots())
    assert policy.worth(slabs[0]) > 0
    assert policy.oldest_age(slabs) >= 0


def test_two_random_takes_its_share_and_prefers_the_old() -> None:
    policy = TwoRandomPolicy(History(), seed=5)
    _, slabs = filled(policy, 20, 10_000)
    for slab in slabs[:10]:
        for slot in slab.used_slots():
            policy.on_hit(slab, slot)
    total = sum(slab.used_count for slab in slabs)
    # Within one slab ages differ little, so that what matters is the share of each.
    victims = chosen(policy, slabs, 0.1)
    assert 0.08 < len(victims) / total < 0.105
    slab = slabs[0]
    for slot in list(slab.used_slots())[: slab.used_count // 2]:
        policy.on_hit(slab, slot)
    young = set(list(slab.used_slots())[: slab.used_count // 2])
    gone = [slot for _ in range(20) for slot in policy.victims(slab, 0.2, 0, slab.slot_count)]
    assert 0.15 < sum(slot in young for slot in gone) / len(gone) < 0.35


def test_sieve_keeps_what_was_read_since_the_hand_passed() -> None:
    policy = SievePolicy(History(), seed=1)
    _, slabs = filled(policy, 4, 90_000)
    order = [(slab.slab_id, slot) for slab in slabs for slot in slab.used_slots()]
    read = set(order[::2])
    for slab_id, slot in read:
        policy.on_hit(slabs[slab_id], slot)
    first = chosen(policy, slabs, 0.25)
    assert first == {place for place in order if place not in read and place <= max(first)}
    assert abs(len(first) - len(order) / 4) <= 1
    second = chosen(policy, slabs, 0.25)
    assert min(second) > max(first)
    # Everything was passed once: what was read is forgotten, and the next round takes it.
    assert chosen(policy, slabs, 0.25) & read


class Epochs:
    """A tier of 200 blocks under the epoch policy, and what it is told of reads."""

    def __init__(self) -> None:
        self.history = ReuseHistory()
        self.policy = EpochPolicy(self.history, seed=1)
        self.slabs = SlabSet(4 << 20, 5)
        self.at: dict[int, tuple[Slab, int]] = {}
        for number in range(5):
            slab = self.slabs.add(number)
            self.slabs.reformat(slab, class_of(90_000), 0)

    def read(self, number: int, keep: bool = True) -> bool:
        if number in self.at:
            self.policy.on_hit(*self.at[number])
            return True
        self.history.on_miss(key(number))
        slab = self.slabs.open_slab(class_of(90_000))
        if keep and slab is not None:
            slot = self.slabs.allocate(slab)
            self.slabs.commit(slab, slot, 90_000, 1)
            self.policy.on_admit(slab, slot, 0)
            self.at[number] = (slab, slot)
        return False

    def epoch(self, numbers: range, seed: int) -> None:
        for number in random.Random(seed).sample(numbers, len(numbers)):
            self.read(number)

    def expired(self) -> int:
        all_slabs = list(self.slabs.by_id.values())
        plan = self.policy.plan(all_slabs, 1.0)
        if plan is None:
            return 0
        return sum(len(self.policy.victims(slab, plan, 0, 999)) for slab in all_slabs)


def test_nothing_expires_before_anything_was_reused() -> None:
    tier = Epochs()
    tier.epoch(range(1000), 1)
    assert len(tier.at) == sum(slab.slot_count for slab in tier.slabs.by_id.values())
    assert tier.expired() == 0


def test_nothing_expires_in_shuffled_epochs() -> None:
    tier = Epochs()
    for seed in range(6):
        for number in random.Random(seed).sample(range(1000), 1000):
            tier.read(number)
            if seed > 1 and number % 50 == 0:
                assert tier.expired() <= 10


def test_another_data_set_expires_the_old_one() -> None:
    tier = Epochs()
    for seed in range(4):
        tier.epoch(range(1000), seed)
    for seed in range(2):
        tier.epoch(range(1000, 2000), seed)
    assert tier.expired() > 0.9 * len(tier.at)


def test_a_small_data_set_expires_a_large_old_one() -> None:
    tier = Epochs()
    for seed in range(4):
        tier.epoch(range(4000), seed)
    for seed in range(7):
        tier.epoch(range(9000, 9050), seed)
    assert tier.expired() == len(tier.at)


def test_a_hot_set_is_kept_through_a_scan() -> None:
    tier = Epochs()
    hot = range(100)
    for seed in range(3):
        tier.epoch(hot, seed)
    scan = iter(range(1000, 100_000))
    for seed in range(20):
        for number in random.Random(seed).sample(hot, len(hot)):
            tier.read(number)
            tier.read(next(scan))
    plan = tier.policy.plan(list(tier.slabs.by_id.values()), 1.0)
    assert plan is not None
    assert all(tier.policy.age(*tier.at[number]) < plan for number in hot)
