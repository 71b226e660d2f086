"""The tree under test, over an origin in memory, with a clock that only tests move."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from tests.namespace.harness import Reading, ScriptedOrigin, Tree, WallClock, open_tier


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin()


@pytest.fixture
async def tree(
    tmp_path: Path, origin: ScriptedOrigin, clock: WallClock, nursery: trio.Nursery
) -> AsyncIterator[Tree]:
    tree = Tree(tmp_path / "namespace", nursery, origin, clock)
    await tree.start()
    yield tree
    tree.db.abandon()


@pytest.fixture
async def reading(tree: Tree, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Reading]:
    tier = open_tier(tmp_path / "cache", tree.origin)
    cache = BlockCache(tree.origin, [tier])
    await nursery.start(cache.run)
    yield Reading(tree, cache, tier)
    await cache.aclose()
