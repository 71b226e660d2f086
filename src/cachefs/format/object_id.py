"""The 128-bit name of one version of one object, the same on every node.

Format 1: xxh3_128 over `identity NUL path NUL version`, each UTF-8 with surrogate escapes
(docs/formats/object_id.md). Changing it makes every cached block unreachable.
"""

import xxhash

OBJECT_ID_BYTES = 16


def object_id(identity: str, path: str, version: str) -> bytes:
    """16 bytes, big-endian digest order as `xxhash` gives it."""
    parts = (identity, path, version)
    return xxhash.xxh3_128_digest(
        b"\0".join(part.encode("utf-8", "surrogateescape") for part in parts)
    )
