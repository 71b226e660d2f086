"""Files of `cachefs metadata import` (cli/files/metadata_file.py)."""

import json

from cachefs.cli.files.metadata_file import MetadataReader
from cachefs.errors import CachefsError
from tests.fuzz.targets._support import check_text, directory


def fuzz(data: bytes) -> None:
    with directory() as place:
        file = place / "f"
        file.write_bytes(data)
        try:
            with MetadataReader.open(file) as reader:
                json.dumps(reader.root)
                for pieces in reader.pieces():
                    json.dumps(pieces)
        except CachefsError as error:
            check_text(error)
