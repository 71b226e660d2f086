"""What is cached in the crash tests, and where: the same in every process."""

import json
import mmap
import random
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cache_dir.disk import Disk
from cachefs.types import Medium, ObjectRef
from tests.cache.harness import MIB, open_tier, put
from tests.memory_origin import MemoryOrigin

SIZES = {
    "tiny": (80, (200, 3_400)),
    "small": (160, (29_000, 32_000)),
    "middle": (120, (55_000, 61_000)),
    "large": (90, (240_000, 290_000)),
    "blocks": (28, (MIB + 30_000, 3 * MIB // 2)),
}
"""Kinds of files: how many, and their sizes from and to. 73 MB in all."""

TIERS: dict[str, tuple[Medium, int]] = {
    "mem": (Medium.MEM, 8 * MIB),
    "ssd1": (Medium.SSD, 12 * MIB),
    "ssd2": (Medium.SSD, 12 * MIB),
    "hdd": (Medium.HDD, 24 * MIB),
}
"""Name of the directory, medium and quota. Slabs have 4 MiB."""


def make_origin() -> tuple[MemoryOrigin, dict[str, list[ObjectRef]]]:
    """The files by kind."""
    origin = MemoryOrigin()
    sizes = random.Random(1)
    files = {
        kind: [put(origin, f"{kind}{number}", sizes.randint(*limits)) for number in range(count)]
        for kind, (count, limits) in SIZES.items()
    }
    return origin, files


def open_tiers(root: Path, names: list[str], disk: Disk | None = None) -> list[CacheDirectory]:
    return [
        open_tier(root / name, TIERS[name][1], medium=TIERS[name][0], disk=disk, pin_ratio=0.2)
        for name in names
    ]


@dataclass
class Order:
    """One run of a worker."""

    root: str
    seed: int
    tiers: list[str]
    policy: str = "lru"
    commit_interval_s: float = 0.03
    cooldown_s: float = 0.01
    """In place of `cooldown.COOLDOWN_S`."""
    kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SIZES, 1.0))
    """How often each kind of file is read."""
    resizing: bool = False
    """Tiers change their quotas, and leave and come back, all the time."""
    undo_file: str | None = None
    """Use an `UndoDisk`."""
    close_after_s: float | None = None
    """End by itself, cleanly."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        return cls(**json.loads(text))


COUNTED = ("reads", "commits", "admitted", "evicted", "demoted", "promoted", "reassigned",
           "adopted", "bad_blocks", "bad_slabs", "changes")  # fmt: skip
"""What a worker notes about its run."""


class Tally:
    """Numbers that outlive the process that wrote them."""

    _STRUCT = struct.Struct(f"<{len(COUNTED)}q")

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(self._STRUCT.size)
            self._map = mmap.mmap(file.fileno(), self._STRUCT.size)

    def write(self, **numbers: int) -> None:
        self._STRUCT.pack_into(self._map, 0, *(numbers[name] for name in COUNTED))

    def take(self) -> dict[str, int]:
        """What was written last, and start from nothing."""
        numbers = dict(zip(COUNTED, self._STRUCT.unpack_from(self._map), strict=True))
        self._STRUCT.pack_into(self._map, 0, *[0] * len(COUNTED))
        return numbers
