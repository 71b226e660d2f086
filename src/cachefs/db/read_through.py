"""Read every row of a database in a separate process; its exit code tells whether that succeeded.

A damaged page may make LMDB read beyond its file, which kills the process.

    python -m cachefs.db.read_through PATH TABLE...
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cachefs.db.environment import DamagedDatabaseError
from cachefs.db.snapshot import DatabaseReader
from cachefs.errors import CacheDirError

_DAMAGED, _UNKNOWN = 3, 4
"""Exit codes. Python's own codes for a failure are 1 and 2."""


def refuse_unreadable(path: Path, tables: Sequence[str]) -> None:
    """Raises `DamagedDatabaseError` if some row of the database can't be read, and `CacheDirError`
    if the process can't find that out. Blocks."""
    command = [sys.executable, "-m", __name__, str(path), *tables]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise DamagedDatabaseError(str(path), "its pages contradict each other")
    if done.returncode == _DAMAGED:
        raise DamagedDatabaseError(str(path), done.stdout.strip())
    if done.returncode:
        said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
        raise CacheDirError(
            f"the database {path} can't be checked: {said or 'for no known reason'}"
        )


def _main(path: str, *tables: str) -> int:
    try:
        reader = DatabaseReader(Path(path), tables)
        for table in tables:
            for _ in reader.scan(table):
                pass
    except DamagedDatabaseError as error:
        print(error.why)
        return _DAMAGED
    except CacheDirError as error:
        print(error)
        return _UNKNOWN
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
