"""`TierConfig`: the cache directories on one medium, as a `[[tier]]` table describes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cachefs import units
from cachefs.config.fields import MEDIUM, RATIO, TIER_PATHS, check_size, nearest, show
from cachefs.config.record import CheckWithOthers, Field, Record
from cachefs.types import Medium

MIN_CACHE_DIR_BYTES = 64 << 20
"""The least capacity of one cache directory."""

_KEYS = {
    "medium": f"one of {', '.join(Medium.__members__)}",
    "path": "a directory, or several",
    "quota": 'a size such as "100GiB"',
    "high": "a ratio",
    "low": "a ratio",
    "free_space_ratio": "a ratio",
    "pin_limit": "a ratio",
}
_REQUIRED = ("medium", "path", "quota")


def _check_quotas(value: object, others: Mapping[str, Any]) -> tuple[int, ...]:
    path_count = len(others["paths"])
    parts: list[Any] = value.split(",") if isinstance(value, str) else [value]
    shared = len(parts) == 1 and not isinstance(value, list | tuple)
    if isinstance(value, list | tuple):
        parts = list(value)
    quotas = [check_size(part) for part in parts]
    if shared:
        quotas = [quotas[0] // path_count] * path_count
    if len(quotas) != path_count:
        raise ValueError(
            f"{show(value)}: {len(quotas)} quotas for {path_count} paths; give one that they "
            "share, or one for each"
        )
    if min(quotas) < MIN_CACHE_DIR_BYTES:
        least = units.format_bytes(MIN_CACHE_DIR_BYTES)
        raise ValueError(f"{show(value)} is too small; the least is {least} for each path")
    return tuple(quotas)


class TierConfig(Record):
    """One or more directories on one medium. Each is a separate cache directory with its own quota
    in bytes. Immutable.

    `path` and `quota` are lists, or text separated by commas (paths also by colons). Several paths
    share a single quota evenly.
    """

    medium: Annotated[Medium, MEDIUM]
    paths: Annotated[tuple[Path, ...], TIER_PATHS] = Field(alias="path")
    quotas: Annotated[tuple[int, ...], CheckWithOthers(_check_quotas)] = Field(alias="quota")
    high: Annotated[float, RATIO]
    low: Annotated[float, RATIO]
    free_space_ratio: Annotated[float, RATIO]
    pin_limit: Annotated[float, RATIO]

    def _prepared(self, values: object) -> Mapping[str, Any]:
        if not isinstance(values, Mapping):
            raise ValueError(f"{show(values)} is not a table; write [[tier]], then key = value")
        for key in values:
            if key not in _KEYS:
                otherwise = f"known are {', '.join(_KEYS)}"
                raise ValueError(f"unknown key {show(key)}; {nearest(str(key), _KEYS, otherwise)}")
        for key in _REQUIRED:
            if key not in values:
                raise ValueError(f"it has no {key}; give it {_KEYS[key]}")
        return values

    def _check_together(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be above 0 and below high ({self.high:g})")
