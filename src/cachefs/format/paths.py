"""All file names inside a cache directory (docs/formats/cache_directory.md) and inside a spool
(docs/formats/spool.md). No other module contains them."""

import re
from pathlib import Path

IDENTITY_NAME = "cachefs.json"
LOCK_NAME = "lock"
SLABS_NAME = "slabs"
INDEX_NAME = "index"
NAMESPACE_NAME = "namespace"
JOBS_NAME = "jobs"
MANIFEST_NAME = "manifest"
SPOOL_NAME = "spool"
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
        SPOOL_NAME,
        PROBE_NAME,
    }
)
"""All names that cachefs creates in a cache directory. A directory without `cachefs.json` may
have some of them if its creation was interrupted; any other name there is a foreign file."""

MAX_SLAB_ID = (1 << 31) - 1
"""The greatest slab id. A file with a greater number doesn't belong to cachefs: ids are u32 on
disk, and the next id must fit, too."""

_SLAB_NAME = re.compile(r"([0-9]{6,10})\.slab")
_TABLE_ENDING = ".table"


def slab_name(slab_id: int) -> str:
    """Return the file name of a slab, for example `000042.slab`."""
    return f"{slab_id:06d}.slab"


def slab_id_of(name: str) -> int | None:
    """Invert `slab_name`; return None for a name that isn't a slab's."""
    match = _SLAB_NAME.fullmatch(name)
    if match is None or slab_name(int(match[1])) != name or int(match[1]) > MAX_SLAB_ID:
        return None
    return int(match[1])


def slab_id_of_table(name: str) -> int | None:
    """Return the slab id in the name of a table file, for example of `000042.table`; None for
    another name."""
    if not name.endswith(_TABLE_ENDING):
        return None
    return slab_id_of(name.removesuffix(_TABLE_ENDING) + ".slab")


class TierPaths:
    """The paths inside the cache directory `root`. Nothing here touches the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = root / IDENTITY_NAME
        self.identity_tmp = root / IDENTITY_TMP_NAME
        self.lock = root / LOCK_NAME
        self.slabs = root / SLABS_NAME
        self.index = root / INDEX_NAME
        self.bad_index = root / BAD_INDEX_NAME
        """Where an index that could not be used is moved."""
        self.new_index = root / NEW_INDEX_NAME
        """The index that `cachefs check --repair` builds. It replaces `index` when complete."""
        self.namespace = root / NAMESPACE_NAME
        """The inode table. Only the first cache directory of a mount has one."""
        self.jobs = root / JOBS_NAME
        """The load jobs, in the same cache directory as the namespace."""
        self.manifests = root / MANIFEST_NAME
        """The views of manifests, in the same cache directory as the namespace."""
        self.spool = root / SPOOL_NAME
        """What was written and not sent, in the same cache directory as the namespace."""
        self.probe = root / PROBE_NAME

    def slab(self, slab_id: int) -> Path:
        return self.slabs / slab_name(slab_id)

    def table(self, slab_id: int) -> Path:
        """The file with header and slot table of a slab that holds one whole object."""
        return self.slab(slab_id).with_suffix(_TABLE_ENDING)


SPOOL_IDENTITY_NAME = "spool.json"
SPOOL_FILES_NAME = "files"
JOURNAL_NAME = "journal"

_SPOOL_FILE_NAME = re.compile(r"([0-9]{6,20})\.staged")


def spool_file_name(number: int) -> str:
    """Return the file name of a staged file's bytes, for example `000042.staged`."""
    return f"{number:06d}.staged"


def spool_number_of(name: str) -> int | None:
    """Invert `spool_file_name`; return None for a name that isn't a spool file's."""
    match = _SPOOL_FILE_NAME.fullmatch(name)
    if match is None or spool_file_name(int(match[1])) != name or int(match[1]) >= 1 << 63:
        return None
    return int(match[1])


class SpoolPaths:
    """The paths inside the spool `root`. Nothing here touches the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = root / SPOOL_IDENTITY_NAME
        self.identity_tmp = root / (SPOOL_IDENTITY_NAME + ".tmp")
        self.lock = root / LOCK_NAME
        self.files = root / SPOOL_FILES_NAME
        self.journal = root / JOURNAL_NAME
        self.new_journal = root / (JOURNAL_NAME + ".new")
        """The journal that is being written anew. It replaces `journal` when complete."""
        self.bad_journal = root / (JOURNAL_NAME + BAD_ENDING)
        """A copy of a damaged journal."""

        self.twice = frozenset({JOURNAL_NAME, JOURNAL_NAME + BAD_ENDING})
        """Names that a crash may leave for one file: a copy begins as a second name."""

    def all_names(self) -> frozenset[str]:
        """Return all names that cachefs creates in `root`."""
        paths = (self.identity, self.identity_tmp, self.lock, self.files)
        journals = (self.journal, self.new_journal, self.bad_journal)
        return frozenset(path.name for path in paths + journals)

    def file(self, number: int) -> Path:
        """Return the path of a staged file's bytes."""
        return self.files / spool_file_name(number)


class ManifestPaths:
    """The paths of one manifest's view. `manifests` is `TierPaths.manifests`; `digest` identifies
    the manifest."""

    def __init__(self, manifests: Path, digest: str) -> None:
        self.manifests = manifests
        self.root = manifests / digest
        self.new = manifests / "new"
        """The view that is being built. It is renamed to `root` when it is complete."""
        self.table = self.root / "table"
        self.namespace = self.root / NAMESPACE_NAME
        """The inode table of this view. The mount of the whole source has its own table."""

    def all_entries(self) -> list[Path]:
        """Return the entries of `manifests`, of all manifests; an empty list if it doesn't
        exist. Raises `OSError`."""
        return list(self.manifests.iterdir()) if self.manifests.exists() else []
