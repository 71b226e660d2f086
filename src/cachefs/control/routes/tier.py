"""Routes that list, add, resize and remove tiers of a running mount.

Only the mount's owner can open the socket. The arguments are still checked like a configuration.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.config import MIN_CACHE_DIR_BYTES, MountConfig, TierConfig, absolute_path, load_tier
from cachefs.control import api
from cachefs.control.api import Handler, NoSuchTierError, Route
from cachefs.control.report import TierReport, tier_report
from cachefs.errors import CacheDirError, UsageError
from cachefs.mounts import refuse_overlaps
from cachefs.units import format_bytes

log = logging.getLogger(__name__)

_ADD_ARGUMENTS = {
    "medium": "medium",
    "path": "path",
    "quota_bytes": "quota",
    "high": "high",
    "low": "low",
    "free_space_ratio": "free_space_ratio",
    "pin_limit": "pin_limit",
}
"""From the arguments of `add` to the keys of a `[[tier]]`."""


class TierRoutes:
    """Changes the tiers of `cache`, one change at a time.

    `tiers` are the mount's open tiers. The daemon owns this list, and closes all tiers in it at
    the end; this class keeps it up to date. `open_tiers` opens directories and runs in a worker
    thread. `home` is the directory of the tier with the mount's names; it can't be removed.
    """

    def __init__(
        self,
        cache: BlockCache,
        config: MountConfig,
        open_tiers: Callable[[TierConfig], list[CacheDirectory]],
        tiers: list[CacheDirectory],
        home: Path,
    ) -> None:
        self._cache = cache
        self._config = config
        self._open_tiers = open_tiers
        self._tiers = tiers
        self._home = home
        self._lock = trio.Lock()

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {
            api.TIERS: self.get,
            api.TIER_RESIZE: self.resize,
            api.TIER_ADD: self.add,
            api.TIER_REMOVE: self.remove,
        }

    async def get(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Answer with `tiers`, a list of `TierReport`s, the fastest first."""
        return {"tiers": [tier_report(tier) for tier in self._cache.status()]}

    async def resize(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Change the quota of the tier at `path` to `quota_bytes`. Answer with `before` and
        `after`, two `TierReport`s."""
        async with self._alone():
            tier = self._find(arguments.get("path"))
            quota_bytes = _checked_quota(arguments.get("quota_bytes"))
            before = self._report(tier)
            await self._cache.resize_tier(tier.paths.root, quota_bytes)
            log.info("%s: the quota is %d bytes now", tier.paths.root, quota_bytes)
            return {"before": before, "after": self._report(tier)}

    async def add(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Add a tier with `medium`, `path`, `quota_bytes` and, optionally, the ratios of a
        `[[tier]]`. Answer with `after`, a `TierReport`."""
        wanted = self._checked_tier(arguments)
        (path,) = wanted.paths
        async with self._alone():
            if any(tier.paths.root == path for tier in self._tiers):
                raise CacheDirError(
                    f"{path} is a tier of this mount already; cachefs tier resize changes its quota"
                )
            (tier,) = await trio.to_thread.run_sync(self._open, wanted)
            self._tiers.append(tier)
            try:
                await self._cache.add_tier(tier)
            except BaseException:
                self._tiers.remove(tier)
                tier.close()
                raise
            log.info("%s: added as a tier of %s", path, wanted.medium.value)
            return {"after": self._report(tier)}

    async def remove(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Remove the tier at `path` from the mount. Answer with `before`, a `TierReport`."""
        async with self._alone():
            tier = self._find(arguments.get("path"))
            path = tier.paths.root
            if tier.paths.root == self._home:
                raise CacheDirError(
                    f"{path} can't be removed while mounted: it holds the mount's names and "
                    "attributes too; unmount, and mount without it"
                )
            before = self._report(tier)
            await self._cache.remove_tier(path)
            self._tiers.remove(tier)
            tier.close()
            log.info("%s: no longer a tier", path)
            return {"before": before}

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Run one change at a time. It can't be cancelled half-way, so an unmount waits for it."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                yield

    def _checked_tier(self, arguments: dict[str, Any]) -> TierConfig:
        unknown = sorted(set(arguments) - set(_ADD_ARGUMENTS))
        if unknown:
            raise UsageError(f"a tier has no argument {unknown[0]}")
        table = {_ADD_ARGUMENTS[name]: value for name, value in arguments.items()}
        # In a list, so that a comma or colon in the path doesn't split it.
        table["path"] = [str(_checked_path(arguments.get("path")))]
        return load_tier(self._config, table)

    def _open(self, wanted: TierConfig) -> list[CacheDirectory]:
        refuse_overlaps(self._config.source, self._config.mountpoint, wanted.paths)
        return self._open_tiers(wanted)

    def _find(self, path: object) -> CacheDirectory:
        wanted = _checked_path(path)
        for tier in self._tiers:
            if tier.paths.root == wanted:
                return tier
        known = ", ".join(str(tier.paths.root) for tier in self._tiers)
        raise NoSuchTierError(f"{wanted} is no tier of this mount; its tiers are {known}")

    def _report(self, tier: CacheDirectory) -> TierReport | None:
        path = str(tier.paths.root)
        return next((tier_report(t) for t in self._cache.status() if t.path == path), None)


def _checked_path(value: object) -> Path:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise UsageError(f"a tier is named by its absolute path, not by {value!r}")
    return absolute_path(value)


def _checked_quota(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value >= 1 << 63:
        raise UsageError(f"a quota is a number of bytes, not {value!r}")
    if value < MIN_CACHE_DIR_BYTES:
        least = format_bytes(MIN_CACHE_DIR_BYTES)
        raise UsageError(f"a quota of {format_bytes(value)} is too small; the least is {least}")
    return value
