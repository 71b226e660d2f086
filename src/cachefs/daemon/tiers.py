"""Opens and closes the cache directories of a mount, and the database of names."""

import contextlib
import logging
import os
import stat
from pathlib import Path

from cachefs.cache.tier.index import set_aside
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.config import MountConfig, TierConfig, user_mem_home
from cachefs.db import DamagedDatabaseError, Database
from cachefs.errors import CacheDirError
from cachefs.format import inode_record
from cachefs.format.paths import TierPaths
from cachefs.trusted_path import open_directory
from cachefs.types import Medium
from cachefs.units import format_bytes

log = logging.getLogger(__name__)

_NAMESPACE_MAP_BYTES = 1 << 38


def open_tiers(
    source_identity: str, *wanted: TierConfig, tolerant: bool = False
) -> list[CacheDirectory]:
    """Open all directories in the given order. Blocks.

    If one can't be used, closes the others and raises `CacheDirError`. With `tolerant`, for a mount
    that is already in use, it logs an error and continues without that directory.
    """
    tiers: list[CacheDirectory] = []
    try:
        for config in wanted:
            for path, quota_bytes in zip(config.paths, config.quotas, strict=True):
                try:
                    if path.is_relative_to(user_mem_home()):
                        _make_private(user_mem_home())
                    tiers.append(_open_tier(source_identity, config, path, quota_bytes))
                except CacheDirError as error:
                    if not tolerant:
                        raise
                    log.error("%s; the mount goes on without this tier until its next mount", error)
    except BaseException:
        close_all(tiers)
        raise
    return tiers


def _open_tier(
    source_identity: str, config: TierConfig, path: Path, quota_bytes: int
) -> CacheDirectory:
    return CacheDirectory.open(
        path,
        quota_bytes=quota_bytes,
        source_identity=source_identity,
        high=config.high,
        low=config.low,
        free_space_ratio=config.free_space_ratio,
        pin_ratio=config.pin_limit,
        medium=config.medium,
    )


def warn_of_sizes(config: MountConfig) -> None:
    """Log a warning for each quota above the size of memory or of its file system. Blocks."""
    given = {"cache_size", "mem_size", "tier_tables"} & config.given
    wanted: dict[int, list[tuple[Path, int]]] = {}
    for tier in config.tiers if given else ():
        for path, quota_bytes in zip(tier.paths, tier.quotas, strict=True):
            if tier.medium is Medium.MEM and quota_bytes > (most := _memory_bytes()):
                log.warning(
                    "%s: %s are more than the machine's memory, %s; choose a smaller --mem-size",
                    path,
                    format_bytes(quota_bytes),
                    format_bytes(most),
                )
                continue
            with contextlib.suppress(OSError):
                wanted.setdefault(path.stat().st_dev, []).append((path, quota_bytes))
    for places in wanted.values():
        paths = ", ".join(str(path) for path, _ in places)
        quota_bytes = sum(quota_bytes for _, quota_bytes in places)
        found = os.statvfs(places[0][0])
        if quota_bytes > (most := found.f_blocks * found.f_frsize):
            log.warning(
                "%s: %s are more than the file system there has, %s; the cache will be smaller",
                paths,
                format_bytes(quota_bytes),
                format_bytes(most),
            )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def close_all(tiers: list[CacheDirectory]) -> None:
    """Close tiers in any state. Blocks."""
    for tier in tiers:
        tier.close()


def _make_private(home: Path) -> None:
    """Create `home`, which lies in a directory where all users may write.

    Raises `CacheDirError` if another user owns it or may write to it.
    """
    try:
        os.close(open_directory(home, make=True))
        found = home.lstat()
    except OSError as error:
        raise CacheDirError(f"can't create {home}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CacheDirError(
            f"{home} is not a directory that only uid {os.geteuid()} may write to; remove it, or "
            "name another with --mem-dir"
        )


def home_of(config: MountConfig, tiers: list[CacheDirectory], spare: Path) -> TierPaths:
    """Return the directory for names, attributes and jobs.

    If its tier isn't open, creates and returns `spare`, a directory in memory. It never uses
    another tier instead, because that may have outdated names. Raises `CacheDirError`.
    """
    wanted = namespace_path(config).parent
    for tier in tiers:
        if tier.paths.root == wanted:
            return tier.paths
    try:
        spare.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CacheDirError(f"can't create {spare}: {error.strerror}") from error
    log.error("names are kept in %s until the mount ends", spare)
    return TierPaths(spare)


def open_names(path: Path) -> Database:
    """Open or create the database of names.

    A damaged one is moved aside and replaced by an empty one: the names are then
    read from the origin again. Raises `CacheDirError`.
    """
    try:
        return Database.open(str(path), inode_record.TABLES, _NAMESPACE_MAP_BYTES)
    except DamagedDatabaseError as error:
        log.warning(
            "%s can't be used (%s): it is moved to %s.bad, and the origin is asked again",
            path,
            error.why,
            path.name,
        )
    try:
        set_aside(path)
    except OSError as error:
        raise CacheDirError(f"can't move {path} away: {error.strerror}") from error
    return Database.open(str(path), inode_record.TABLES, _NAMESPACE_MAP_BYTES)


def namespace_path(config: MountConfig) -> Path:
    """Return the path of the database of names: in the first directory that is not in memory, or
    in the first one if all are in memory."""
    homes = [tier for tier in config.tiers if tier.medium is not Medium.MEM] or config.tiers
    return TierPaths(homes[0].paths[0]).namespace
