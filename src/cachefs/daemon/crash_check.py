"""After a crash: reads the files that the previous daemon had mapped, before they are mapped again.

If the disk can't read a page any more, an access through a mapping kills the process (SIGBUS), but
a read of the file only returns an error.
"""

import logging
from collections.abc import Callable

from cachefs.config import MountConfig
from cachefs.db import mark_unreadable
from cachefs.format.paths import ManifestPaths, TierPaths

log = logging.getLogger(__name__)


def check_files(config: MountConfig, on_progress: Callable[[], None]) -> None:
    """Read the index, the namespace and the views of manifests of every tier, and mark unreadable
    databases as damaged.

    A new database replaces a marked one when it is opened. Blocks until all files are read; calls
    `on_progress` from time to time.
    """
    for tier in config.tiers:
        for path in tier.paths:
            paths = TierPaths(path)
            mark_unreadable(paths.index, on_progress)
            mark_unreadable(paths.namespace, on_progress)
            for view in _views(paths):
                mark_unreadable(view.table, on_progress)
                mark_unreadable(view.namespace, on_progress)


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
