"""Finding the files of a job: how often a listing that fails is repeated."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import BadDataError, OriginUnavailableError
from cachefs.load import walk as load_walk
from cachefs.load.paths import PathReader
from cachefs.load.spec import LoadSpec, Progress
from cachefs.load.throttle import LoadThrottle
from cachefs.load.walk import Failure, Walk
from cachefs.namespace.clock import Clock
from cachefs.origin.resilience import Resilience, ResilientOrigin
from tests.cache.harness import until
from tests.namespace.harness import ScriptedOrigin, Tree, open_tier

SETTINGS = Resilience(read_timeout_s=5.0, request_timeout_s=2.0)


async def nothing() -> AsyncIterator[bytes]:
    for line in ():
        yield line


class Rig:
    """A walk over the whole of an origin, with retries that hardly wait."""

    def __init__(self, tree: Tree, resilient: ResilientOrigin, cache: BlockCache) -> None:
        self.resilient = resilient
        self.progress = Progress()
        self.failures: list[Failure] = []
        throttle = LoadThrottle(cache, resilient, 1 << 20)
        self.walk = Walk(
            tree.namespace,
            LoadSpec({"paths": ("",)}),
            tree.clock.now_ns(),
            self.progress,
            throttle,
            self.failures.append,
            resilient,
        )

    async def run(self) -> None:
        await self.walk.run([""], nothing(), PathReader("/mnt", "fake://test"))


@pytest.fixture
def origin() -> ScriptedOrigin:
    origin = ScriptedOrigin()
    origin.put("good/1", b"one")
    origin.put("bad/2", b"two")
    return origin


@pytest.fixture
async def rig(
    tmp_path: Path,
    origin: ScriptedOrigin,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(load_walk, "_WAIT_S", 0.01)
    resilient = ResilientOrigin(origin, SETTINGS)
    await nursery.start(resilient.run)
    tree = Tree(tmp_path / "namespace", nursery, resilient, Clock())  # type: ignore[arg-type]
    await tree.start()
    tier = open_tier(tmp_path / "cache", origin)
    cache = BlockCache(resilient, [tier])
    await nursery.start(cache.run)
    yield Rig(tree, resilient, cache)
    await cache.aclose()
    tree.db.abandon()


@pytest.mark.long
async def test_a_listing_that_is_always_wrong_is_given_up(rig: Rig, origin: ScriptedOrigin) -> None:
    """The origin is up: only this answer is of no use."""

    async def refuse(path: str, number: int) -> None:
        if path == "bad":
            raise BadDataError("the listing of bad is wrong")

    origin.before_page = refuse
    with trio.fail_after(300):
        await rig.run()
    ((path, error),) = rig.failures
    assert path == "bad"
    assert "the listing of bad is wrong" in error
    assert (rig.progress.files, rig.progress.failed_files) == (1, 1)
    assert rig.progress.waiting_for is None


@pytest.mark.long
@pytest.mark.expect_log("does not answer")
@pytest.mark.expect_log("answers again")
async def test_an_outage_is_waited_for(rig: Rig, origin: ScriptedOrigin) -> None:
    async with trio.open_nursery() as nursery:
        origin.down = OriginUnavailableError("it is away")
        with pytest.raises(OriginUnavailableError):
            await rig.resilient.stat("good/1")
        await until(lambda: rig.resilient.is_down)
        nursery.start_soon(rig.run)
        await until(lambda: rig.progress.waiting_for is not None)
        await trio.sleep(10 * load_walk._WAIT_S)
        assert not rig.failures
        origin.down = None
        await until(lambda: rig.progress.files == 2)
        nursery.cancel_scope.cancel()
    assert not rig.failures


async def test_failures_during_an_outage_do_not_count(rig: Rig) -> None:
    """The last of them may be told when the outage has just ended."""
    tries = 0

    async def list_it(path: str) -> None:
        nonlocal tries
        tries += 1
        origin.is_down = tries < 10
        if tries < 12:
            raise OriginUnavailableError("it is away")

    origin = SimpleNamespace(is_down=True)
    rig.walk._origin = origin  # type: ignore[assignment]
    with trio.fail_after(300):
        await rig.walk._patiently(list_it, "d")
    assert tries == 12
