"""Files that jobs say they will read: what is fetched ahead, how much, and for whom."""

import random
from collections.abc import Sequence
from pathlib import Path

import pyfuse3
import pytest
import trio
import trio.testing

from cachefs.fuse.hint_requests import FULL, TAKEN, HintRequests
from cachefs.namespace.namespace import ROOT_INO
from cachefs.prefetch import hints as hints_module
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.prefetch import Prefetch
from tests.namespace.harness import Reading
from tests.prefetch.harness import FreeThrottle

FILES = 600
SIZE_BYTES = 20_000
JOB = (1000, b"job")


class Job:
    """Reads files, with hints for them."""

    def __init__(self, reading: Reading, nursery: trio.Nursery) -> None:
        self.reading = reading
        prefetch = Prefetch(
            reading.tree.namespace,
            reading.cache,
            nursery,
            LookUpReads(reading.cache),
            lambda: True,
            FreeThrottle(),
            0,
            "off",
        )
        reading.readers = prefetch.readers
        self.hints = prefetch.hints

    def hint(self, names: Sequence[str], job: tuple[int, bytes] = JOB) -> list[str]:
        """Those that were taken, up to the first that was not."""
        taken = []
        for name in names:
            if not self.hints.take(job, ROOT_INO, name.encode()):
                break
            taken.append(name)
        return taken

    async def read(self, name: str) -> None:
        inode = await self.reading.tree.find(name)
        data = await self.reading.read(inode.ino, 0, inode.size_bytes)
        assert data == self.reading.origin.expected(name)

    async def fetched(self) -> list[str]:
        """The files that the origin was asked for since the last call."""
        await trio.testing.wait_all_tasks_blocked()
        assert self.reading.cache.fetching_count == 0
        return [r[1] for r in self.reading.origin.take_requests() if r[0] == "read"]


@pytest.fixture
async def job(reading: Reading, nursery: trio.Nursery) -> Job:
    for number in range(FILES):
        reading.origin.put_generated(f"d{number % 7}/f{number:03}", SIZE_BYTES, seed=number)
    return Job(reading, nursery)


def shuffled(seed: int = 3) -> list[str]:
    names = [f"d{number % 7}/f{number:03}" for number in range(FILES)]
    random.Random(seed).shuffle(names)
    return names


async def test_hinted_files_come_before_they_are_read(job: Job) -> None:
    names = shuffled()
    assert job.hint(names) == names
    assert sorted(await job.fetched()) == sorted(names[:256]), "a window of them"
    for name in names[:100]:
        await job.read(name)
    assert sorted(await job.fetched()) == sorted(names[256:356]), "it moves on with the reader"
    for name in names[100:]:
        await job.read(name)
    assert sorted(await job.fetched()) == sorted(names[356:]), "each once"


async def test_the_window_has_a_limit_in_bytes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "_MOST_BYTES", 10 * SIZE_BYTES)
    job.hint(shuffled())
    assert len(await job.fetched()) <= 10 + hints_module._REQUESTS


async def test_what_no_tier_takes_comes_once(job: Job, tmp_path: Path) -> None:
    await job.reading.cache.remove_tier(tmp_path / "cache")
    names = shuffled()[:200]
    job.hint(names)
    await job.fetched()
    for name in names:
        await job.read(name)
    assert await job.fetched() == []


async def test_wrong_hints_cost_nothing(job: Job) -> None:
    wrong = ["no/such", "d1", "..", "../..", "d1/../d2/f002", "", "/", "d1/f001/below"]
    for name in wrong:
        assert job.hints.take(JOB, ROOT_INO, name.encode())
    assert job.hints.take(JOB, 999_999, b"d1/f001")
    right = shuffled()[:5]
    job.hint(right)
    assert sorted(await job.fetched()) == sorted(right)


async def test_a_job_is_told_when_it_has_sent_enough(job: Job) -> None:
    names = shuffled()
    many = names + names
    taken = job.hint(many)
    assert len(taken) == 1_024
    await job.fetched()
    assert job.hint(names[:10]) == names[:10], "there is room again"


async def test_jobs_have_a_share_each(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "_MOST_BYTES", 100 * SIZE_BYTES)
    first, second = shuffled()[:300], shuffled()[300:]
    job.hint(first[:1], (1, b"a"))
    job.hint(second[:1], (2, b"b"))
    job.hint(first[1:], (1, b"a"))
    job.hint(second[1:], (2, b"b"))
    fetched = await job.fetched()
    assert {name in first for name in fetched} == {True, False}
    for share in (first, second):
        assert 50 <= len(set(fetched) & set(share)) <= 50 + hints_module._REQUESTS


async def test_one_user_can_not_end_the_jobs_of_others(job: Job) -> None:
    assert job.hint(shuffled()[:1], (1, b"mine"))
    for number in range(40):
        assert job.hint(shuffled()[:1], (2, b"%d" % number))
    assert (1, b"mine") in job.hints._jobs
    assert len(job.hints._jobs) <= 5


async def test_a_file_that_is_read_already_is_not_fetched(job: Job) -> None:
    name = shuffled()[0]
    await job.read(name)
    assert await job.fetched() == [name]
    job.hint([name])
    assert await job.fetched() == []


class Taken:
    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.is_full = False

    def take(self, job_key: tuple[int, bytes], directory: int, path: bytes) -> bool:
        if not self.is_full:
            self.paths.append(path)
        return not self.is_full


def test_long_paths_come_in_pieces() -> None:
    taken = Taken()
    requests = HintRequests(taken)
    assert requests.answer(1, 1, b"user.cachefs.hint.j.+abc/") == TAKEN
    assert requests.answer(2, 1, b"user.cachefs.hint.j.=other") == TAKEN
    taken.is_full = True
    assert requests.answer(1, 1, b"user.cachefs.hint.j.=def") == FULL
    taken.is_full = False
    assert requests.answer(1, 1, b"user.cachefs.hint.j.+abc/") == TAKEN
    assert requests.answer(1, 1, b"user.cachefs.hint.j.=def") == TAKEN
    assert taken.paths == [b"other", b"abc/def"]


@pytest.mark.parametrize(
    "name", [b"", b"j", b"j.", b"j.x", b".=x", b"j" * 17 + b".=x", b"j.=", b"j.+"]
)
def test_nonsense_is_refused(name: bytes) -> None:
    with pytest.raises(pyfuse3.FUSEError):
        HintRequests(Taken()).answer(0, 1, b"user.cachefs.hint." + name)


def test_an_endless_path_is_refused() -> None:
    requests = HintRequests(Taken())
    for _ in range(17):
        requests.answer(0, 1, b"user.cachefs.hint.j.+" + b"x" * 230)
    with pytest.raises(pyfuse3.FUSEError):
        requests.answer(0, 1, b"user.cachefs.hint.j.+" + b"x" * 230)
