"""What `cachefs flush` makes of files that can and can't be sent."""

from collections.abc import Iterator
from contextlib import aclosing
from types import SimpleNamespace

import trio
from trio.testing import MockClock

from cachefs.errors import ConflictError, OriginUnavailableError
from cachefs.writes.unsent.flush import Flushes, FlushFailure, FlushProgress, is_below
from cachefs.writes.unsent.report import UnsentFile, UnsentState


class FakeMount:
    """Unsent files by number, which is the inode number, too; `errors` are those of their sends."""

    def __init__(self, *paths: str) -> None:
        self.paths = dict(enumerate(paths, 1))
        self.errors: dict[int, Exception] = {}
        self.open: set[int] = set()
        self.tried: list[int] = []
        self.spool = SimpleNamespace(files=self.paths)

    def all(self) -> Iterator[UnsentFile]:
        for number in list(self.paths):
            yield self.get(number)

    def get(self, number: int) -> UnsentFile:
        state = UnsentState.OPEN if number in self.open else UnsentState.WAITING
        return UnsentFile(number, self.paths.get(number, ""), state, 10, 0, "", 0.0, None)

    def entry_of(self, path: str) -> SimpleNamespace:
        number = next(number for number, each in self.paths.items() if each == path)
        return SimpleNamespace(ino=number)

    def generations_to_send(self) -> dict[int, int]:
        return {number: 1 for number in self.paths if number not in self.open}

    async def send(self, ino: int, *, is_close: bool) -> None:
        self.tried.append(ino)
        await trio.sleep(1)
        if ino in self.errors:
            raise self.errors[ino]

    async def flush(
        self, nursery: trio.Nursery, below: str = ""
    ) -> tuple[FlushProgress, dict[str, str]]:
        """The last progress, and the failures."""
        failures: dict[str, str] = {}
        progress = FlushProgress(0, 0, 0, 0)
        flushes = Flushes(self, self, nursery)  # type: ignore[arg-type]
        async with aclosing(flushes.flush(below)) as news:
            async for what in news:
                if isinstance(what, FlushFailure):
                    failures[what.path] = what.reason
                else:
                    progress = what
        return progress, failures


async def test_all_below_a_path_are_sent(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    mount = FakeMount("a/1", "a/2", "ab", "b")
    progress, failures = await mount.flush(nursery, "a")
    assert (progress, failures) == (FlushProgress(2, 20, 0, 0), {})
    assert sorted(mount.tried) == [1, 2]
    assert is_below("a", "a")
    assert not is_below("ab", "a")


async def test_failures_are_told_and_others_are_sent(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    mount = FakeMount(*map(str, range(10)))
    mount.errors[3] = ConflictError("another version")
    mount.open = {5}
    progress, failures = await mount.flush(nursery)
    assert progress == FlushProgress(8, 80, 0, 0)
    assert failures["2"] == "another version"
    assert "its next close sends it" in failures["4"]
    assert len(failures) == 2


async def test_an_origin_that_does_not_answer_is_not_tried_for_all(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    mount = FakeMount(*map(str, range(100)))
    mount.errors = dict.fromkeys(mount.paths, OriginUnavailableError("no answer"))
    progress, failures = await mount.flush(nursery)
    assert progress == FlushProgress(0, 0, 0, 0)
    assert len(mount.tried) <= 8
    assert set(failures) == set(mount.paths.values())
    assert sum("was not tried" in why for why in failures.values()) >= 92
