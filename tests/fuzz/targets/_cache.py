"""A cache directory with a few blocks, made once, and what must hold when it is opened again."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from unittest.mock import patch

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.check import directory as check
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.errors import CachefsError
from cachefs.types import ObjectRef
from tests.cache.harness import assert_right, put_many
from tests.fuzz.targets._support import directory
from tests.memory_origin import MemoryOrigin

SLAB_BYTES = 64 << 10
_QUOTA_BYTES = 1 << 20


def _open(path: Path, origin: MemoryOrigin) -> CacheDirectory:
    return CacheDirectory.open(
        path, _QUOTA_BYTES, origin.identity, free_space_ratio=0.0, slab_bytes=SLAB_BYTES
    )


async def _serve(
    path: Path, origin: MemoryOrigin, refs: list[ObjectRef], crash: bool = False
) -> None:
    """All blocks, twice; with `crash` the directory is left as a killed daemon leaves it."""
    block_cache = BlockCache(origin, [_open(path, origin)], policy_name="lru")
    async with trio.open_nursery() as nursery:
        await nursery.start(block_cache.run)
        with trio.fail_after(300):
            for _ in range(2):
                await assert_right(block_cache, origin, refs)
            await block_cache.drain()
        if not crash:
            await block_cache.aclose()
        nursery.cancel_scope.cancel()
    if crash:
        block_cache.abandon()


@cache
def _template() -> tuple[dict[str, bytes], MemoryOrigin, list[ObjectRef]]:
    """The files of a directory with nine blocks in slabs of two classes."""
    origin = MemoryOrigin()
    refs = put_many(origin, 6, 700) + put_many(origin, 3, 9_000, "g")
    with directory() as place:
        trio.run(_serve, place / "c", origin, refs)
        files = {
            str(file.relative_to(place / "c")): file.read_bytes()
            for file in sorted((place / "c").rglob("*"))
            if file.is_file()
        }
    return files, origin, refs


def damage(change: Callable[[Path], None], was_clean: bool) -> None:
    """`change` the directory; then everything that is read is right, and a repair ends well."""
    files, origin, refs = _template()
    with directory() as place:
        path = place / "c"
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        change(path)
        for use in (
            lambda: check.check_directory(path),
            lambda: trio.run(_serve, path, origin, refs, not was_clean),
            lambda: check.check_directory(path, repair=True),
            lambda: trio.run(_serve, path, origin, refs),
        ):
            # It takes a process, and the pages of the database are whole here.
            with suppress(CachefsError), patch.object(check, "refuse_unreadable"):
                use()
