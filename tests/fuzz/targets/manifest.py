"""Manifest files, lines and Parquet, and the table that they become (manifest/)."""

from contextlib import closing, suppress

from cachefs.errors import CachefsError
from cachefs.format.paths import ManifestPaths
from cachefs.load.paths import PathReader
from cachefs.manifest.files import read_manifest
from cachefs.manifest.table import ManifestTable, build
from tests.fuzz.targets._support import check_text, directory

_PATHS = PathReader("/mnt", "s3://bucket/data")


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
