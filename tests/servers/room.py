"""Free disk space that a server needs. No pytest here: demo and bench use it too."""

import shutil
from pathlib import Path


def need_room(directory: Path, needed_bytes: int, who: str) -> None:
    """Make the directory. Raise `RuntimeError`, one line, if less is free in it."""
    directory.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise RuntimeError(
            f"{who} needs {needed_bytes >> 20} MiB free in {directory}, and there are "
            f"{free_bytes >> 20} MiB: remove files, or let TMPDIR name a disk with room"
        )
