"""Encode and decode `cachefs.json`, which identifies a cache directory and its source
(docs/formats/cache_directory.md).

The `format` number covers the whole directory: this file, the slabs and the index.
"""

from dataclasses import dataclass

from cachefs.errors import CacheDirError
from cachefs.format.json_sum import decode_json, encode_json

DIRECTORY_FORMAT = 2
MOST_BYTES = 64 << 10
"""The most bytes of the file that are read."""


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """The identity of a cache directory: its uuid (16 bytes), its slab size, and `source`.

    `source` is an `Origin.identity`. The directory may contain blocks of this source only.
    """

    uuid: bytes
    slab_bytes: int
    source: str


def encode_identity(identity: TierIdentity) -> bytes:
    """Return the content of `cachefs.json`."""
    document = {
        "format": DIRECTORY_FORMAT,
        "uuid": identity.uuid.hex(),
        "slab_bytes": identity.slab_bytes,
        "source": identity.source,
    }
    return encode_json(document, indent=2)


def decode_identity(data: bytes, directory: str) -> TierIdentity:
    """Decode the content of `cachefs.json`.

    Raises `CacheDirError`, with the name `directory` in its text, if the format is newer or no
    longer supported, or if the file is damaged.
    """
    try:
        document = decode_json(data)
        version = document["format"]
        if isinstance(version, int) and version > DIRECTORY_FORMAT:
            raise CacheDirError(
                f"cache directory {directory} has format {version}, this cachefs knows up to "
                f"{DIRECTORY_FORMAT}: use a newer cachefs or another directory"
            )
        if version == 1:
            raise CacheDirError(
                f"cache directory {directory} has format 1, which is no longer read: "
                "remove what is in it, or name another"
            )
        uuid = bytes.fromhex(document["uuid"])
        slab_bytes, source = document["slab_bytes"], document["source"]
        if version != DIRECTORY_FORMAT or len(uuid) != 16 or not isinstance(source, str):
            raise ValueError("a field has an impossible value")
        if not isinstance(slab_bytes, int) or slab_bytes < 4096 or slab_bytes % 4096:
            raise ValueError("slab_bytes is not a multiple of 4096")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CacheDirError(
            f"{directory}/cachefs.json can't be understood ({error}): "
            "empty the directory or name another"
        ) from error
    return TierIdentity(uuid, slab_bytes, source)
