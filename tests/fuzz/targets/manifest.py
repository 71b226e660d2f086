"""Manifest files, lines and Parquet, and the table that they become (manifest/)."""

from contextlib import closing, suppress

from cachefs.errors import CachefsError
from cachefs.format.paths import ManifestPaths
from cachefs.load.paths import PathReader
from cachefs.manifest.files import read_manifest
from cachefs.manifest.table import ManifestTable, build
from tests.fuzz.targets._support import check_text, directory

_PATHS = PathReader("/mnt", "s3://bucket/data")

GROWING = {
    "short lines": lambda count: b"".join(b"%x\n" % n for n in range(count // 6)),
    "lines": lambda count: b"".join(b"a/b/c/0123456789/%08x.jpg\n" % n for n in range(count // 32)),
    "one line": lambda count: b"a" * count,
    "deep paths": lambda count: (b"a/" * 500 + b"\n") * (count // 1001),
    "objects": lambda count: b"".join(
        b'{"path": "%08x.jpg", "size": 1, "mtime_ns": 1, "version": "a"}\n' % n
        for n in range(count // 64)
    ),
    "brackets": lambda count: b'{"path":' + b"[" * count,
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    with directory() as place:
        file = place / "m"
        file.write_bytes(data)
        paths = ManifestPaths(place / "manifests", "digest")
        try:
            listed = list(read_manifest(file, "m", _PATHS.path))
            build(paths, listed, needs_owners=False)
        except CachefsError as error:
            check_text(error)
            return
        table = ManifestTable.open(paths.table)
        with closing(table.db):
            for item in listed:
                with suppress(KeyError):
                    table.find(item.path)


def _read(data: bytes) -> None:
    with directory() as place, suppress(CachefsError):
        (place / "m").write_bytes(data)
        for _ in read_manifest(place / "m", "m", _PATHS.path):
            pass


PARSERS = (_read,)
"""What is measured with `GROWING`. The table is a database: it takes what its rows take."""
