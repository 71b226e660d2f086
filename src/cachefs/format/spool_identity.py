"""Encode and decode `spool.json`, which identifies a spool and its source (docs/formats/spool.md).

The `format` number covers the whole directory: this file, the journal and the spool files.
"""

from dataclasses import dataclass

from cachefs.errors import SpoolError
from cachefs.format.json_sum import decode_json, encode_json

SPOOL_FORMAT = 1
MOST_BYTES = 64 << 10
"""The most bytes of the file that are read."""


@dataclass(frozen=True, slots=True)
class SpoolIdentity:
    """The identity of a spool: its uuid (16 bytes), and the `Origin.identity` of the one source to
    which its files belong."""

    uuid: bytes
    source: str


def encode_identity(identity: SpoolIdentity) -> bytes:
    """Return the content of `spool.json`."""
    document = {"format": SPOOL_FORMAT, "uuid": identity.uuid.hex(), "source": identity.source}
    return encode_json(document, indent=2)


def decode_identity(data: bytes, directory: str) -> SpoolIdentity:
    """Decode the content of `spool.json`. Raises `SpoolError`, with the name `directory` in its
    text, if the format is newer, or the file is damaged."""
    try:
        document = decode_json(data)
        version = document["format"]
        if isinstance(version, int) and version > SPOOL_FORMAT:
            raise SpoolError(
                f"spool {directory} has format {version}, this cachefs knows up to "
                f"{SPOOL_FORMAT}: use a newer cachefs"
            )
        uuid, source = bytes.fromhex(document["uuid"]), document["source"]
        if version != SPOOL_FORMAT or len(uuid) != 16 or not isinstance(source, str):
            raise ValueError("a field has an impossible value")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SpoolError(
            f"{directory}/spool.json can't be understood ({str(error)[:200]!r}): it names the "
            "spool of files that are not at the origin yet, so restore it from a copy"
        ) from error
    return SpoolIdentity(uuid, source)
