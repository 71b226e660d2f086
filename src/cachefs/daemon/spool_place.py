"""Chooses the directory of the spool."""

import logging
import os
from pathlib import Path

from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cache_dir.probe import is_in_memory
from cachefs.db.database import Database
from cachefs.errors import SpoolError
from cachefs.format.paths import SpoolPaths, TierPaths
from cachefs.format.spool_identity import MOST_BYTES, decode_identity
from cachefs.trusted_path import read_own_file
from cachefs.writes.unsent.leftover import read_spool

log = logging.getLogger(__name__)

_SPOOL = b"spool"
"""Key of the row in the table `meta` of the names: the path of the spool."""


def choose_spool(
    home: TierPaths, tiers: list[CacheDirectory], source: str, noted: Path | None = None
) -> Path:
    """Return the directory of the spool of a source: beside the names, or in the first cache
    directory that is not in memory. A spool with unsent files of this source comes first,
    wherever an earlier mount has left it. All daemons of a mount have one spool: `noted` is that of
    the daemon before this one. Blocks. Raises `SpoolError` if that one is gone, and `OSError`."""
    by_root = {place.root: place for place in (home, *(tier.paths for tier in tiers))}
    if noted is not None:
        if noted not in (place.spool for place in by_root.values()):
            raise SpoolError(f"{noted} is gone")
        return noted
    places = list(by_root.values())
    places.sort(key=lambda place: is_in_memory(place.root))  # the order stays otherwise
    with_files = [place for place in places if _has_files(place.spool, source)]
    chosen = [*with_files, *places][0]
    for other in with_files[1:]:
        log.warning(
            "%s has unsent files, too, and this mount does not use them: "
            "cachefs writes --cache-dir %s",
            other.spool,
            other.root,
        )
    if is_in_memory(chosen.root):
        log.warning(
            "%s, with the only copy of what is not at the source yet, is in memory: a reboot loses "
            "it; name a directory on a disk with --cache-dir",
            chosen.spool,
        )
    return chosen.spool


def note_spool(names: Database, root: Path) -> None:
    """Note the spool of this mount beside its names, for later daemons."""
    names.put("meta", _SPOOL, os.fsencode(root))


def noted_spool(names: Database) -> Path | None:
    """Return what `note_spool` has noted; None if nothing."""
    noted = names.get("meta", _SPOOL)
    return None if noted is None else Path(os.fsdecode(noted))


def _has_files(root: Path, source: str) -> bool:
    """Return whether there is a spool of this source with files."""
    try:
        identity = decode_identity(read_own_file(SpoolPaths(root).identity, MOST_BYTES), str(root))
    except (SpoolError, OSError):
        return False
    if identity.source != source:
        return False
    try:
        return bool(read_spool(root).files)
    except (SpoolError, OSError):
        return True  # it can't be read now: opening it waits, or says why
