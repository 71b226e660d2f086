"""The context of every case: a server, directories, and the amount of work."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import rig


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work of a run."""

    rounds: int
    small_files: int
    large_bytes: int
    names: int
    warm_passes: int


FULL = Scale(rounds=3, small_files=5_000, large_bytes=512 << 20, names=100_000, warm_passes=3)
QUICK = Scale(rounds=3, small_files=1_500, large_bytes=256 << 20, names=20_000, warm_passes=3)
_DIRECTORY_FILES = 100
_LEAST_ROUND_S = 60.0


@dataclass(slots=True)
class Bench:
    """One run of the benchmark."""

    directory: Path
    server: rig.Server
    scale: Scale
    say: Callable[[str], None]
    store: Any = None
    ends_at: float = math.inf
    """When the time for the run is over, by `time.monotonic`."""
    tree: Path | None = None
    """The work tree of the cachefs that is mounted; None for the installed one."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _made: dict[str, Any] = field(default_factory=dict)

    def mount(self, prefix: str, *options: str, endpoint: str | None = None) -> rig.Mount:
        """Return a mount of `prefix` that is not mounted yet, with its own cache directory.

        Its origin is `endpoint`, by default the server itself.
        """
        return rig.Mount(
            self.directory / f"mount-{next(self._numbers)}",
            f"s3://{rig.BUCKET}/{prefix}",
            self.environment,
            endpoint or self.server.endpoint,
            ["--cache-size", "8GiB", "--free-space-ratio", "0.01", *options],
        )

    def of_tree(self, tree: Path) -> "Bench":
        """Return the same run with the cachefs of another work tree, whose compiled parts are
        built."""
        return replace(self, tree=tree)

    @property
    def environment(self) -> dict[str, str]:
        """What `cachefs` needs in its environment: keys of the server, and where its code is."""
        code = {} if self.tree is None else {"PYTHONPATH": str(self.tree / "src")}
        return {**self.server.environment, **code}

    def rounds(self, title: str, most: int) -> Iterator[int]:
        """Yield the numbers of rounds, from 0 on, while the longest of them would end in time, but
        at least one."""
        longest_s, began = _LEAST_ROUND_S, time.monotonic()
        for turn in range(most):
            if turn:
                longest_s, began = max(longest_s, time.monotonic() - began), time.monotonic()
            if turn and time.monotonic() + longest_s > self.ends_at:
                self.say(f"{title}: no time for round {turn + 1}")
                return
            self.say(f"{title}: round {turn + 1} of {most}")
            yield turn

    @property
    def list_file(self) -> Path:
        return self.directory / "read.list"

    @property
    def local(self) -> Path:
        """The directory with the same files on the local file system."""
        return self.directory / "local"

    def small_files(self) -> list[str]:
        """Return names below `local/small` and the prefix `small`: files of 20 to 180 KB. Makes
        and uploads the files on the first call."""
        if "small" not in self._made:
            self.say(f"making and uploading {self.scale.small_files:,} files of 20 to 180 KB")
            self._made["small"] = self._make("small", small_sizes(self.scale.small_files))
        names: list[str] = self._made["small"]
        return names

    def tree_files(self) -> list[str]:
        """Return names below `local/tree` and the prefix `tree`: files of 20 to 180 KB in
        directories of `_DIRECTORY_FILES`. Makes and uploads the files on the first call."""
        if "tree" not in self._made:
            count = self.scale.small_files
            self.say(f"making and uploading {count:,} files in directories")
            self._made["tree"] = self._make("tree", small_sizes(count), _DIRECTORY_FILES)
        names: list[str] = self._made["tree"]
        return names

    def large_file(self) -> str:
        """Return one name below `local/large` and the prefix `large`. Makes and uploads the file
        on the first call."""
        if "large" not in self._made:
            self.say(f"making and uploading one file of {self.scale.large_bytes >> 20} MiB")
            self._made["large"] = self._make("large", [self.scale.large_bytes])
        name: str = self._made["large"][0]
        return name

    def files(self, prefix: str, sizes: Sequence[int]) -> list[str]:
        """Return names below `local/PREFIX` and the prefix: files of these sizes in bytes. Makes
        and uploads the files on the first call."""
        if prefix not in self._made:
            self.say(f"making and uploading {len(sizes):,} files: {prefix}")
            self._made[prefix] = self._make(prefix, sizes)
        names: list[str] = self._made[prefix]
        return names

    def _make(self, prefix: str, sizes: Sequence[int], directory_files: int = 0) -> list[str]:
        """Make and upload files, in directories of `directory_files` each if that is not 0."""
        directory = self.local / prefix
        noise = random.Random(prefix).randbytes(16 << 20)
        names = [f"{number:06}.bin" for number in range(len(sizes))]
        if directory_files:
            names = [f"{n // directory_files:03}/{name}" for n, name in enumerate(names)]
        for number, (name, size_bytes) in enumerate(zip(names, sizes, strict=True)):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with (directory / name).open("wb") as file:
                while size_bytes > 0:
                    start = (number * 7919 + size_bytes) % (len(noise) >> 1)
                    size_bytes -= file.write(noise[start : start + min(size_bytes, 8 << 20)])
        rig.upload(self.store, ((f"{prefix}/{name}", directory / name) for name in names))
        return names


def small_sizes(count: int) -> list[int]:
    """Return the sizes of the small files, in bytes."""
    chance = random.Random(20_180)
    return [chance.randrange(20_000, 180_001) for _ in range(count)]


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """Return a copy in an order that depends only on `seed`."""
    order = list(names)
    random.Random(seed).shuffle(order)
    return order


def discard(mount: rig.Mount) -> None:
    """Unmount and delete the cache."""
    mount.unmount()
    mount.remove()
