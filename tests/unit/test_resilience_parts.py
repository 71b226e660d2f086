"""The state machines of `origin.resilience`, each told the time, and limits of users."""

import random

import pytest
import trio
from trio.testing import MockClock

from cachefs.fuse import uid_limits
from cachefs.fuse.uid_limits import INO_BITS, INO_MASK, UidLimits
from cachefs.origin.resilience.bandwidth import TokenBucket
from cachefs.origin.resilience.breaker import Breaker
from cachefs.origin.resilience.limiter import AdaptiveLimit, RequestSlots
from cachefs.origin.resilience.pace import Pace
from cachefs.origin.resilience.reading import Reading
from cachefs.origin.retry_after import parse_retry_after

MIB = 1 << 20


# Breaker


def test_the_breaker_opens_after_a_long_run_and_a_failed_probe() -> None:
    breaker = Breaker(open_after_s=4)
    for now in (2.0, 3.0, 4.5):
        breaker.failed(now - 2, now, f"at {now}")
        assert not breaker.try_to_open(now)
    breaker.check_failed()
    assert not breaker.try_to_open(3.9)
    assert breaker.try_to_open(4.5)
    assert not breaker.try_to_open(5), "opens once"
    assert breaker.is_open
    assert breaker.reason == "at 4.5"
    assert breaker.answered()
    assert not breaker.is_open
    assert not breaker.answered()


def test_any_answer_ends_a_run() -> None:
    breaker = Breaker(open_after_s=4)
    breaker.failed(0, 1, "")
    breaker.check_failed()
    breaker.answered()
    breaker.failed(5, 6, "")
    assert not breaker.try_to_open(6), "neither old failures nor old probes count"
    breaker.check_failed()
    assert not breaker.try_to_open(8)
    assert breaker.try_to_open(9)


def test_failures_of_long_ago_are_no_run() -> None:
    breaker = Breaker(open_after_s=4)
    breaker.failed(0, 1, "")
    breaker.failed(100, 101, "")
    breaker.check_failed()
    assert not breaker.try_to_open(101)


def test_when_a_run_is_worth_a_probe() -> None:
    breaker = Breaker(open_after_s=3)
    assert not breaker.is_suspect(0)
    breaker.failed(0, 0.1, "")
    assert not breaker.is_suspect(0.5)
    assert breaker.is_suspect(1.0)
    breaker.failed(0, 0.2, "")
    breaker.failed(0, 0.3, "")
    assert breaker.is_suspect(0.3)


# Concurrency


def test_the_limit_gives_way_once_per_moment_and_comes_back() -> None:
    limit = AdaptiveLimit(64)
    for _ in range(16):
        limit.refused(began_at=0.0, now=1.0, in_flight=32)
    assert limit.now == 27, "counted from what was under way, and once"
    limit.refused(began_at=1.5, now=2.0, in_flight=27)
    assert limit.now == 22
    for _ in range(100):
        limit.served(in_flight=5)
    assert limit.now == 22, "nobody knows what more would do"
    for _ in range(23):
        limit.served(in_flight=22)
    assert limit.now == 23
    for _ in range(10_000):
        limit.served(in_flight=64)
    assert limit.now == 64
    for now in range(2, 100):
        limit.refused(now, now, in_flight=1)
    assert limit.now == 1


def test_a_new_maximum() -> None:
    limit = AdaptiveLimit(8)
    limit.most = 16
    assert limit.now == 16
    limit.refused(1, 1, in_flight=10)
    limit.most = 32
    assert limit.now == 8, "what the origin said holds"
    limit.most = 4
    assert limit.now == 4


async def test_slots_are_given_in_order() -> None:
    slots = RequestSlots(AdaptiveLimit(2))
    assert slots.try_take()
    assert slots.try_take()
    assert not slots.try_take()
    first, second, third = slots.ask(), slots.ask(), slots.ask()
    assert slots.queued == 3
    slots.withdraw(first)
    slots.release()
    assert second.is_set()
    assert not slots.try_take(), "others wait"
    slots.withdraw(second)
    assert third.is_set()
    slots.release()
    slots.release()
    assert (slots.in_flight, slots.queued) == (0, 0)


def test_a_fixed_capacity_is_used_almost_fully_with_few_refusals() -> None:
    """A server that serves 16 at a time for one unit each, and nodes that don't know that."""
    limit = AdaptiveLimit(64)
    served = refused = 0
    in_service: list[int] = []
    capacity = 0
    for now in range(2000):
        running, in_service = in_service, []
        for _ in running:
            limit.served(len(running))
        served += len(running)
        capacity += 16
        for started in range(min(limit.now, 32)):
            if started < 16:
                in_service.append(now)
            else:
                refused += 1
                limit.refused(now, now, min(limit.now, 32))
    assert served / capacity > 0.85
    assert refused / served < 0.05


# Bandwidth


@pytest.mark.parametrize(("is_whole", "deadline"), [(False, 110.0), (True, 90.0)])
async def test_bytes_postpone_a_deadline_as_far_as_they_are_kept(
    is_whole: bool, deadline: float
) -> None:
    """A whole object must arrive in one request: the next try moves the same bytes again."""
    reading = Reading(1000, is_whole, lambda _: None)
    assert reading.postponed(80.0, 40.0, 60.0) == 80.0, "no byte has moved"
    reading.moved_at = 50.0
    assert reading.postponed(80.0, 40.0, 60.0) == deadline


async def test_a_read_whose_tries_all_trickle_ends() -> None:
    reading = Reading(1000, True, lambda _: None)
    deadline, now = 4.5, 0.0
    while now < deadline:
        reading.moved_at = now + 15.0
        deadline = reading.postponed(deadline, now, 4.5)
        now += 15.1
    assert now < 40


def test_a_bucket_is_even() -> None:
    rng = random.Random(1)
    bucket = TokenBucket(10 * MIB)
    now, given = 0.0, []
    while now < 5:
        size = rng.randrange(1, MIB)
        now += bucket.reserve(size, now)
        given.append((now, size))
    for start in range(5):
        second = sum(size for at, size in given if start <= at < start + 1)
        assert second == pytest.approx(10 * MIB, rel=0.15)


def test_a_bucket_does_not_save_up_for_long() -> None:
    bucket = TokenBucket(MIB)
    assert bucket.reserve(MIB, 1000) == 0
    assert bucket.reserve(1, 1000) == pytest.approx(0.95)


def test_a_new_rate_holds_for_what_is_owed() -> None:
    bucket = TokenBucket(MIB)
    bucket.reserve(11 * MIB, 0)
    bucket.set_rate(10 * MIB, 0)
    assert bucket.reserve(1, 0) == pytest.approx(1.1, rel=0.1)
    bucket.set_rate(None, 0)
    assert bucket.reserve(100 * MIB, 0) == 0
    bucket.set_rate(MIB, 0)
    assert bucket.reserve(1, 0) == 0


async def test_limits_of_users(autojump_clock: MockClock) -> None:
    limits = UidLimits({7: MIB})
    handle, free = limits.handle(5, 7), limits.handle(5, 8)
    assert handle & INO_MASK == free & INO_MASK == 5
    assert handle != free
    assert limits.buckets[free >> INO_BITS] is None
    began_at = trio.current_time()
    for _ in range(11):
        await limits.wait(handle, MIB)
    assert trio.current_time() - began_at == pytest.approx(10, rel=0.02)
    limits.set(7, 0)
    assert limits.by_uid() == {}
    assert limits.handle(5, 7) == handle, "a later limit finds what is open"
    began_at = trio.current_time()
    await limits.wait(handle, 100 * MIB)
    await limits.wait(free, 100 * MIB)
    assert trio.current_time() == began_at
    limits.set(8, MIB)
    assert limits.by_uid() == {8: MIB}
    await limits.wait(free, 3 * MIB)
    await limits.wait(free, MIB)
    assert trio.current_time() > began_at + 1


async def test_more_users_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uid_limits, "_USERS", 3)
    limits = UidLimits({7: MIB})
    assert limits.handle(5, 8) >> INO_BITS == 2
    assert limits.handle(5, 9) == 5
    limits.set(9, 0)
    with pytest.raises(ValueError, match="no more than 2 users"):
        limits.set(9, MIB)
    limits.read_bytes[0] += 11
    limits.read_bytes[2] += 22
    assert list(limits.usage()) == [(None, 11, 0), (7, 0, 0), (8, 22, 0)]


# Pace


def test_large_bodies_may_take_longer_the_slower_others_came() -> None:
    pace = Pace()
    assert pace.allowance_s(1000) < 0.001
    assert 0.5 < pace.allowance_s(8 * MIB) < 3
    for _ in range(100):
        pace.note(MIB, 0.005)
    quick_s = pace.allowance_s(8 * MIB)
    for _ in range(100):
        pace.note(MIB, 0.1)
    assert pace.allowance_s(8 * MIB) > 2 * quick_s
    for _ in range(100):
        pace.note(MIB, 50)
    assert pace.allowance_s(8 * MIB) == 8, "there is an end to it"


def test_stragglers_are_the_slowest_twentieth() -> None:
    pace = Pace()
    assert pace.straggler_s(1) is None
    for index in range(400):
        pace.note(1000, 0.1 if index % 25 == 0 else 0.02)
    assert pace.straggler_s(1000) == pytest.approx(0.04), "those that are alike are none"
    for index in range(400):
        pace.note(1000, 0.1 if index % 10 == 0 else 0.02)
    assert pace.straggler_s(1000) == pytest.approx(0.1)
    assert pace.straggler_s(8 * MIB) is None


# Retry-After


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), (" 0 ", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), (None, None), ("soon", None)],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds
