"""The options of the cache, and the tiers that they describe."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from cachefs.config.fields import (
    CHOICE,
    DURATION,
    PATH,
    PATHS,
    RATIO,
    Flag,
    Group,
    check_ratio,
    default_cache_dirs,
    default_mem_dir,
    size,
)
from cachefs.config.options import Section
from cachefs.config.record import CheckWithOthers, Field, FieldError
from cachefs.config.tiers import MIN_CACHE_DIR_BYTES, TierConfig
from cachefs.types import Medium

TIER_SHORTHANDS = ("cache_dirs", "cache_size", "mem_size", "mem_dir")
"""Options that describe the tiers if there is no `[[tier]]` table."""

_HIGH, _LOW = 0.97, 0.92

TIER_RATIOS = {
    "high": "cache_high",
    "low": "cache_low",
    "free_space_ratio": "free_space_ratio",
    "pin_limit": "pin_limit",
}
"""The options of the mount that a tier's table inherits, by key of the table."""


def _check_tiers(tables: object, others: Mapping[str, Any]) -> tuple[TierConfig, ...]:
    """Return the tiers, with the mount's ratios in each table that lacks them."""
    if not isinstance(tables, list | tuple) or not tables:
        raise ValueError("write [[tier]], with two brackets, once for each medium")
    ratios = {key: others[field] for key, field in TIER_RATIOS.items()}
    tiers = []
    for index, table in enumerate(tables):
        try:
            tiers.append(TierConfig(_filled_in(table, ratios)))
        except FieldError as error:
            raise FieldError(str(error), (index, *error.place)) from error
    return tuple(tiers)


class CacheSection(Section):
    """The cache directories, what is kept in them, and how it is verified."""

    group = Group.CACHE

    cache_dirs: Annotated[
        tuple[Path, ...],
        PATHS,
        Flag(
            "DIR[:DIR...]",
            names=("--cache-dir",),
            shown_default="/var/cache/cachefs/ID for root, else ~/.cache/cachefs/ID",
        ),
    ] = Field(
        default_factory=default_cache_dirs,
        description="The directories for cached blocks. Several directories share the load. One "
        "mount at a time uses a directory.",
    )
    cache_size: Annotated[int, size(MIN_CACHE_DIR_BYTES), Flag("SIZE")] = Field(
        100 << 30, description="Keep at most this many bytes in all cache directories together."
    )
    mem_size: Annotated[int, size(MIN_CACHE_DIR_BYTES, or_zero=True), Flag("SIZE")] = Field(
        0,
        description="Keep at most this many bytes in memory, in front of the cache directories. "
        "They stay there when the mount has ended. 0 means that there is no tier in "
        "memory.",
    )
    mem_dir: Annotated[Path, PATH, Flag("DIR", shown_default="/dev/shm/cachefs-UID/ID")] = Field(
        default_factory=default_mem_dir,
        description="The directory for the tier in memory. It is on a tmpfs.",
    )
    free_space_ratio: Annotated[float, RATIO, Flag("RATIO")] = Field(
        0.1, description="Leave this share of each cache file system free."
    )
    cache_high: Annotated[float, RATIO, Flag("RATIO")] = Field(
        _HIGH,
        description="Evict blocks when more than this share of the cache size is in use. epoch "
        "does not evict blocks that are read again and again.",
    )
    cache_low: Annotated[
        float,
        RATIO,
        Flag("RATIO", shown_default="0.92, or as far below --cache-high in proportion"),
    ] = Field(
        default_factory=lambda data: _usual_low(data["cache_high"]),
        description="Stop eviction when this share of the cache size is in use.",
    )
    pin_limit: Annotated[float, RATIO, Flag("RATIO")] = Field(
        0.8, description="Let at most this share of each cache directory be pinned (cachefs pin)."
    )
    tier_tables: Annotated[tuple[TierConfig, ...], CheckWithOthers(_check_tiers)] = Field(
        (),
        description="Tiers, as [[tier]] tables in a file. They replace the directories and "
        "sizes above.",
    )
    cache_eviction: Annotated[
        Literal["epoch", "lru", "sieve", "2-random", "none"], CHOICE, Flag("POLICY")
    ] = Field(
        "epoch",
        description="Which blocks to evict. epoch is for training, where each file is read once "
        "per epoch. lru evicts the blocks that were read longest ago. sieve and "
        "2-random are for comparison. none evicts nothing, and stores nothing more "
        "when the cache is full.",
    )
    verify: Annotated[
        Literal["first", "full"], CHOICE, Flag(names=("--verify", "--verify-cache-checksum"))
    ] = Field(
        "first",
        description="When to verify blocks. Each read from a disk is compared with its "
        "checksum. With full, each read also verifies blocks in memory tiers, and "
        "checks to which block a slot belongs. With first, only the first read of a "
        "block after a start does this.",
    )
    scrub_interval: Annotated[float, DURATION, Flag("TIME")] = Field(
        7 * 86400.0,
        description="Verify every cached block again within this time. 0 means never.",
    )

    def _check_together(self) -> None:
        super()._check_together()
        if not 0 < self.cache_low < self.cache_high:
            raise ValueError(
                f"cache_low ({self.cache_low:g}) must be above 0 and below "
                f"cache_high ({self.cache_high:g})"
            )
        self._check_shorthands()
        paths = [path for tier in self.tiers for path in tier.paths]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{path} stands in two tiers; each needs a directory of its own")

    def _check_shorthands(self) -> None:
        given = [name for name in TIER_SHORTHANDS if name in self.given]
        if self.tier_tables:
            if given:
                option = given[0].replace("cache_dirs", "cache_dir")
                raise ValueError(
                    f"{option} and [[tier]] both say what the cache is made of; use one or the "
                    "other"
                )
            return
        if "mem_dir" in given and "mem_size" not in given:
            raise ValueError("mem_dir needs mem_size, or nothing is kept there; give both")
        least = MIN_CACHE_DIR_BYTES * len(self.cache_dirs)
        if self.cache_size < least:
            raise ValueError(
                f"cache_size must be at least {least >> 20}MiB for {len(self.cache_dirs)} cache "
                "directories; raise it or name fewer of them"
            )

    @property
    def tiers(self) -> tuple[TierConfig, ...]:
        """The tiers of the cache, fastest medium first."""
        if self.tier_tables:
            fastest_first = list(Medium)
            return tuple(sorted(self.tier_tables, key=lambda t: fastest_first.index(t.medium)))
        disks = self._shorthand(Medium.SSD, self.cache_dirs, self.cache_size)
        if self.mem_size == 0:
            return (disks,)
        return (self._shorthand(Medium.MEM, (self.mem_dir,), self.mem_size), disks)

    def _shorthand(self, medium: Medium, paths: tuple[Path, ...], quota_bytes: int) -> TierConfig:
        return self.tier_from({"medium": medium, "path": paths, "quota": quota_bytes})

    def tier_from(self, table: Mapping[str, object]) -> TierConfig:
        """Return the tier that a `[[tier]]` table describes. Raises `FieldError`."""
        ratios = {key: getattr(self, field) for key, field in TIER_RATIOS.items()}
        return TierConfig(_filled_in(table, ratios))


def _filled_in(table: object, ratios: Mapping[str, float]) -> object:
    """Return a tier's table with the mount's ratios for missing keys. A `high` without a `low`
    also changes `low`, unless the mount sets its own `low`."""
    if not isinstance(table, Mapping):
        return table
    filled = {**ratios, **table}
    usual = _usual_low(ratios["high"])
    if "high" in table and "low" not in table and ratios["low"] == usual:
        with suppress(ValueError):  # `TierConfig` raises it again with an explanation
            filled["low"] = _usual_low(check_ratio(table["high"]))
    return filled


def _usual_low(high: float) -> float:
    return round(high * _LOW / _HIGH, 4)
