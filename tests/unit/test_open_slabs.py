"""Which slab files are open (`cache_dir/open_slabs.py`), and that they are few."""

import os
import resource
from collections.abc import Iterator

import pytest

from cachefs.cache_dir.open_slabs import OpenSlabs, descriptors_for_slabs
from cachefs.cache_dir.slab import Slab

TIB = 1 << 40


@pytest.fixture
def slabs() -> Iterator[list[Slab]]:
    slabs = [Slab(number, 1 << 21) for number in range(10)]
    yield slabs
    for slab in slabs:
        if slab.fd >= 0:
            os.close(slab.fd)


def open_one(slab: Slab, among: OpenSlabs) -> None:
    slab.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    among.note(slab)


def numbers(slabs: list[Slab]) -> list[int]:
    return [slab.slab_id for slab in slabs if slab.fd >= 0]


def test_the_one_that_was_not_read_goes(slabs: list[Slab]) -> None:
    among = OpenSlabs(3)
    for slab in slabs[:3]:
        open_one(slab, among)
    for slab in slabs[:3]:
        slab.was_read = slab.slab_id != 1
    open_one(slabs[3], among)
    assert numbers(slabs) == [0, 2, 3]
    open_one(slabs[4], among)
    assert len(numbers(slabs)) == len(among) == 3
    assert slabs[4].fd >= 0, "the newest has just been asked for"


def test_what_is_in_use_stays_open(slabs: list[Slab]) -> None:
    among = OpenSlabs(2)
    for slab in slabs[:2]:
        open_one(slab, among)
    with slabs[0].in_use():
        slabs[1].add_reference(0)
        for slab in slabs[2:6]:
            open_one(slab, among)
        assert numbers(slabs) == [0, 1, 5], "one too many, as the others are in use"
    open_one(slabs[6], among)
    assert len(numbers(slabs)) == 2
    assert slabs[1].fd >= 0


def test_what_others_have_closed_makes_room(slabs: list[Slab]) -> None:
    among = OpenSlabs(3)
    for slab in slabs[:3]:
        open_one(slab, among)
    os.close(slabs[1].fd)
    slabs[1].fd = -1
    assert len(among) == 2
    open_one(slabs[3], among)
    assert numbers(slabs) == [0, 2, 3]


@pytest.mark.parametrize(
    ("allowed", "for_slabs"),
    [(20, 1), (192, 48), (256, 112), (1024, 768), (1 << 17, (1 << 17) - 4096)],
)
def test_how_many(monkeypatch: pytest.MonkeyPatch, allowed: int, for_slabs: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (allowed, allowed))
    assert descriptors_for_slabs() == for_slabs
