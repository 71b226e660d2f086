"""Every file name inside a cache directory (docs/formats/cache_directory.md). Nothing else
spells them."""

import re
from dataclasses import dataclass
from pathlib import Path

IDENTITY_NAME = "cachefs.json"
LOCK_NAME = "lock"
SLABS_NAME = "slabs"
INDEX_NAME = "index"
NAMESPACE_NAME = "namespace"
JOBS_NAME = "jobs"
MANIFEST_NAME = "manifest"
PROBE_NAME = "probe.tmp"
IDENTITY_TMP_NAME = IDENTITY_NAME + ".tmp"
BAD_ENDING = ".bad"
BAD_INDEX_NAME = INDEX_NAME + BAD_ENDING
BAD_NAMESPACE_NAME = NAMESPACE_NAME + BAD_ENDING
NEW_INDEX_NAME = INDEX_NAME + ".new"

OWN_NAMES = frozenset(
    {
        IDENTITY_NAME,
        IDENTITY_TMP_NAME,
        LOCK_NAME,
        SLABS_NAME,
        INDEX_NAME,
        BAD_INDEX_NAME,
        NEW_INDEX_NAME,
        NAMESPACE_NAME,
        BAD_NAMESPACE_NAME,
        JOBS_NAME,
        MANIFEST_NAME,
        PROBE_NAME,
    }
)
"""Names that an interrupted creation may have left behind."""

MAX_SLAB_ID = (1 << 31) - 1
"""A file with a greater number is none of ours: ids are u32 on disk, and there must be a next."""

_SLAB_NAME = re.compile(r"([0-9]{6,10})\.slab")


def slab_name(slab_id: int) -> str:
    return f"{slab_id:06d}.slab"


def slab_id_of(name: str) -> int | None:
    """The inverse of `slab_name`; None for any other name."""
    match = _SLAB_NAME.fullmatch(name)
    if match is None or slab_name(int(match[1])) != name or int(match[1]) > MAX_SLAB_ID:
        return None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class TierPaths:
    """The files of one cache directory."""

    root: Path

    @property
    def identity(self) -> Path:
        return self.root / IDENTITY_NAME

    @property
    def identity_tmp(self) -> Path:
        return self.root / IDENTITY_TMP_NAME

    @property
    def lock(self) -> Path:
        return self.root / LOCK_NAME

    @property
    def slabs(self) -> Path:
        return self.root / SLABS_NAME

    @property
    def index(self) -> Path:
        return self.root / INDEX_NAME

    @property
    def bad_index(self) -> Path:
        """An index that could not be used, moved out of the way."""
        return self.root / BAD_INDEX_NAME

    @property
    def new_index(self) -> Path:
        """What `cachefs check --repair` builds, until it takes the index's place."""
        return self.root / NEW_INDEX_NAME

    @property
    def namespace(self) -> Path:
        """The inode table; in the first cache directory of a mount only."""
        return self.root / NAMESPACE_NAME

    @property
    def jobs(self) -> Path:
        """Load jobs; beside the namespace."""
        return self.root / JOBS_NAME

    @property
    def manifests(self) -> Path:
        """The view of a manifest; beside the namespace."""
        return self.root / MANIFEST_NAME

    @property
    def probe(self) -> Path:
        return self.root / PROBE_NAME

    def slab(self, slab_id: int) -> Path:
        return self.slabs / slab_name(slab_id)


@dataclass(frozen=True, slots=True)
class ManifestPaths:
    """The files of the view of one manifest, in `TierPaths.manifests`."""

    manifests: Path
    digest: str

    @property
    def root(self) -> Path:
        return self.manifests / self.digest

    @property
    def new(self) -> Path:
        """What is being built, until it is renamed to `root`."""
        return self.manifests / "new"

    @property
    def table(self) -> Path:
        return self.root / "table"

    @property
    def namespace(self) -> Path:
        """The inode table of this view: that of the whole source is another."""
        return self.root / NAMESPACE_NAME

    def all_entries(self) -> list[Path]:
        """Of whatever manifests."""
        return list(self.manifests.iterdir()) if self.manifests.exists() else []
