"""Compute the 128-bit id of one version of one object. It is the same on every node.

Format 1: xxh3_128 over `identity NUL path NUL version`, each in UTF-8 with surrogate escapes
(docs/formats/object_id.md). A change of this format makes every cached block unreachable.
"""

import xxhash

OBJECT_ID_BYTES = 16


def object_id(identity: str, path: str, version: str) -> bytes:
    """Return the id: 16 bytes, in the big-endian digest order of `xxhash`.

    `identity` is `Origin.identity`, `path` is relative to the mounted prefix, and `version` is
    `ObjectMeta.version`.
    """
    parts = (identity, path, version)
    return xxhash.xxh3_128_digest(
        b"\0".join(part.encode("utf-8", "surrogateescape") for part in parts)
    )
