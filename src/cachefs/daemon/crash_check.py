"""Before a start: checks the databases that may be damaged, before they are mapped.

LMDB is not safe with a damaged file: it may read or write where nothing is mapped, which kills the
process, at each start anew. If the disk can't read a page any more, an access through a mapping
kills it, too (SIGBUS). So another process reads such files first (`db/read_through.py`).
"""

import logging
from collections.abc import Iterable

from cachefs.db import copy_suspect
from cachefs.format import index_record, inode_record, manifest_record
from cachefs.format.paths import ManifestPaths, TierPaths

log = logging.getLogger(__name__)


def check_databases(directories: Iterable[TierPaths], has_crashed: bool) -> None:
    """Check the index, the namespace and the views of manifests of each cache directory, if the
    last daemon of the mount `has_crashed`; otherwise only those in which a daemon has found a
    damaged row. In most starts there are none, and nothing is read.

    Rows without damage are kept. If a database can't be read, a new one replaces it when it is
    opened. So does a table of a manifest from which a row is missing, because the origin can't be
    asked for it. The directories must be locked. Blocks until all is read.
    """
    for paths in directories:
        copy_suspect(paths.index, index_record.TABLES, has_crashed)
        copy_suspect(paths.namespace, inode_record.TABLES, has_crashed)
        for view in _views(paths):
            copy_suspect(view.table, manifest_record.TABLES, has_crashed, needs_all=True)
            copy_suspect(view.namespace, inode_record.TABLES, has_crashed)


def _views(paths: TierPaths) -> list[ManifestPaths]:
    """Return the views of manifests in a cache directory. There are none if they can't be
    listed."""
    try:
        return [ManifestPaths(paths.manifests, each.name) for each in paths.manifests.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s can't be read: %s", paths.manifests, error.strerror)
        return []
