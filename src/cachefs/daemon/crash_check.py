"""After a crash: reads the files that the previous daemon had mapped, before they are mapped again.

If the disk can't read a page any more, an access through a mapping kills the process (SIGBUS), but
a read of the file only returns an error.
"""

from collections.abc import Callable

from cachefs.config import MountConfig
from cachefs.db import mark_unreadable
from cachefs.format.paths import TierPaths


def check_files(config: MountConfig, on_progress: Callable[[], None]) -> None:
    """Read the index and the namespace of every tier, and mark unreadable databases as damaged.

    A new database replaces a marked one when it is opened. Blocks until all files are read; calls
    `on_progress` from time to time.
    """
    for tier in config.tiers:
        for path in tier.paths:
            paths = TierPaths(path)
            mark_unreadable(paths.index, on_progress)
            mark_unreadable(paths.namespace, on_progress)
