"""Lists of files for `cachefs load` and its jobs on disk (load/paths.py, load/job_files.py)."""

from cachefs.errors import UsageError
from cachefs.load.job_files import JobFiles
from cachefs.load.paths import PathReader
from tests.fuzz.targets._support import directory

_PATHS = PathReader("/mnt", "s3://bucket/data")

GROWING = {
    "short lines": lambda count: b"a\n" * (count // 2),
    "lines": lambda count: b"a/b/c/0123456789/0123456789.jpg\n" * (count // 32),
    "one line": lambda count: b"a" * count,
    "deep paths": lambda count: (b"a/" * 500 + b"\n") * (count // 1001),
    "objects": lambda count: b'{"path": "a/b/c/0123456789.jpg"}\n' * (count // 33),
    "a list": lambda count: b"[" + b"1," * (count // 2) + b"1]",
    "brackets": lambda count: b"[" * count,
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    for line in data.splitlines(keepends=True):
        try:
            found = _PATHS.line(line)
        except UsageError:
            continue
        assert found is None or found.path.encode("utf-8", "surrogateescape") is not None
    with directory() as place:
        (place / "jobs" / "abc").mkdir(parents=True)
        (place / "jobs" / "abc" / "job.json").write_bytes(data)
        JobFiles(place / "jobs").read_all()
