"""What a profile keeps of many requests."""

import random
from collections import Counter

import pytest

from cachefs.control.profile import Heat, HotKeys, Profile
from cachefs.fuse.observers import Answered


def path_of(ino: int) -> str:
    return "/" if ino == 1 else f"/dir{ino}"


def read(ino: int, given_bytes: int = 100, lasted_ns: int = 1000) -> Answered:
    read = Answered("read", "hit", lasted_ns, ino, uid=5, offset=0)
    return read._replace(wanted_bytes=200, given_bytes=given_bytes)


def test_few_keys_are_counted_exactly() -> None:
    hot = HotKeys(capacity=30)
    for key in range(60):
        for _ in range(key):
            hot.note(key, 10, 3)
    assert dict(hot.items())[59] == Heat(59, 590, 177)
    assert hot.missed == Heat(0, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_of_many_keys_the_hottest_are_found(seed: int) -> None:
    """Of 50,000 keys a few have a hundredth of all each; nothing is off by more than is said."""
    dice = random.Random(seed)
    hot, true = HotKeys(capacity=300), Counter[int]()
    for _ in range(100_000):
        key = dice.randrange(10) if dice.random() < 0.1 else dice.randrange(50_000)
        hot.note(key, 1, 1)
        true[key] += 1
    found = dict(hot.items())
    assert len(found) <= 600
    for key, count in true.most_common(10):
        assert count - hot.missed.requests <= found[key].requests <= count  # type: ignore[index]
    assert hot.missed.requests < true.most_common(10)[-1][1]


def test_a_key_that_is_hot_in_one_thing_stays() -> None:
    hot = HotKeys(capacity=30)
    hot.note(-1, 1 << 30, 1)
    hot.note(-2, 1, 1 << 40)
    for key in range(1000):
        hot.note(key, 5, 5)
        hot.note(key, 5, 5)
    found = dict(hot.items())
    assert found[-1].given_bytes == 1 << 30
    assert found[-2].lasted_ns == 1 << 40


def test_operations_and_the_slowest() -> None:
    profile = Profile(top=3)
    for number in range(1, 101):
        profile.observe(read(2, lasted_ns=number * 1_000_000), path_of)
    profile.observe(Answered("lookup", "absent", 500_000_000, 1, b"odd\xff", 7, 8), path_of)
    profile.observe(Answered("open", "ok", 0, 2, None, 7, 8), path_of)
    report = profile.report(path_of)
    assert report["requests"] == 102
    reads, lookup, opened = report["operations"]  # type: ignore[misc]
    assert (reads["operation"], reads["outcome"], reads["count"]) == ("read", "hit", 100)
    assert reads["seconds"] == pytest.approx(5.05)
    assert reads["max_s"] == 0.1
    assert 0.09 < reads["p99_s"] <= 0.1
    assert (lookup["max_s"], lookup["p99_s"]) == (0.5, 0.5)
    assert opened["operation"] == "open"
    first, second, third = report["slowest"]  # type: ignore[misc]
    assert first == {
        "seconds": 0.5, "operation": "lookup", "outcome": "absent", "path": "/odd\udcff",
        "uid": 7, "pid": 8, "offset": None, "size_bytes": None,
    }  # fmt: skip
    assert [second["seconds"], third["seconds"]] == [0.1, 0.099]
    assert (second["path"], second["offset"], second["size_bytes"]) == ("/dir2", 0, 200)


def test_the_hottest_by_what_they_cost() -> None:
    profile = Profile(top=2)
    for _ in range(10):
        profile.observe(read(2, given_bytes=1), path_of)
    profile.observe(read(3, given_bytes=5000), path_of)
    profile.observe(read(4, lasted_ns=10**9), path_of)
    profile.observe(Answered("lookup", "ok", 50, 1, b"dir2"), path_of)  # the same path
    hottest = profile.report(path_of)["hottest"]
    first = {rank: rows[0] for rank, rows in hottest.items()}  # type: ignore[attr-defined]
    assert first["requests"] == {"path": "/dir2", "requests": 11, "bytes": 10, "seconds": 1.005e-5}
    assert first["bytes"]["path"] == "/dir3"
    assert first["seconds"]["path"] == "/dir4"
    assert all(len(rows) == 2 for rows in hottest.values())  # type: ignore[attr-defined]


def test_no_requests() -> None:
    report = Profile(top=5).report(path_of)
    assert report["requests"] == 0
    assert report["hottest"] == {"requests": [], "bytes": [], "seconds": []}
