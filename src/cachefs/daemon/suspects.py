"""After a crash: read the files that the daemon before had mapped, before they are mapped again.

A page that the disk can't read any more kills whoever looks at it in a mapping (SIGBUS), but is an
error for those who read it from the file.
"""

from collections.abc import Callable

from cachefs.config import MountConfig
from cachefs.db import mark_unreadable
from cachefs.format.paths import TierPaths


def check_files(config: MountConfig, on_progress: Callable[[], None]) -> None:
    """Databases that can't be read as a whole are marked as damaged, and will be made anew. Blocks
    for as long as it takes to read all of them; `on_progress` is called now and then."""
    for tier in config.tiers:
        for path in tier.paths:
            paths = TierPaths(path)
            mark_unreadable(paths.index, on_progress)
            mark_unreadable(paths.namespace, on_progress)
