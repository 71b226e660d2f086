"""The checksum of small files of JSON (docs/formats/cache_directory.md).

It is in a field of its own. A file without the field comes from an older version of cachefs.
"""

import json
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_hexdigest

_FIELD = "checksum"


def encode_json(document: Mapping[str, object], indent: int) -> bytes:
    """Return the content of a file with this document and its checksum."""
    return json.dumps({**document, _FIELD: _sum_of(document)}, indent=indent).encode() + b"\n"


def decode_json(data: bytes) -> dict[str, Any]:
    """Invert `encode_json`. Raises `ValueError`, or `RecursionError`, for anything else, and if the
    checksum is wrong."""
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    checksum = document.pop(_FIELD, None)
    if checksum is not None and checksum != _sum_of(document):
        raise ValueError("its checksum is wrong")
    return document


def _sum_of(document: Mapping[str, object]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxh3_64_hexdigest(text.encode())
