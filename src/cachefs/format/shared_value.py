"""Keys and values of blocks in the shared tier, format 1 (docs/formats/shared_value.md).

A key hides the name of the object. A value proves that it was written for its key by somebody who
knows the secret. Without a secret the proof is only a checksum: anybody can compute it.
"""

import base64
import hmac
import struct
from typing import NamedTuple

import xxhash
from blake3 import blake3

from cachefs.types import Buffer

FORMAT = 1
KEY_BYTES = 24
"""A key is base64, so it has none of the characters that memcached refuses."""
PROOF_BYTES = 16
PREFIX_BYTES = 1 + PROOF_BYTES
"""What stands before the block's bytes in a value: the format and the proof."""
GROUP_BLOCKS = 8
"""Blocks of one object that lie next to each other and have the same member: as many as one GET
fetches."""

_NAMES = "cachefs shared tier, format 1: keys"
_PROOFS = "cachefs shared tier, format 1: proofs"
_KEY_DIGEST_BYTES = KEY_BYTES * 3 // 4
_INDEX = struct.Struct("<I")


class ObjectName(NamedTuple):
    """The digest of one version of one object: keys and groups of its blocks follow from it."""

    digest: bytes

    def group(self, block_index: int) -> int:
        """Return the 64-bit hash that chooses the member for a block."""
        return xxhash.xxh3_64_intdigest(self.digest + _INDEX.pack(block_index // GROUP_BLOCKS))


class SharedFormat:
    """Makes and checks keys and values with one secret."""

    def __init__(self, secret: bytes) -> None:
        """An empty `secret` means none."""
        self._name_key = blake3(secret, derive_key_context=_NAMES).digest()
        self._proof_key = blake3(secret, derive_key_context=_PROOFS).digest()

    def name(self, identity: str, path: str, version: str) -> ObjectName:
        """Return the name of an object's version. `identity` is `Origin.identity`, and `path` is
        below it. Mounts of different prefixes give the same object the same name."""
        full = f"{identity.rstrip('/')}/{path}\0{version}"
        return ObjectName(self._keyed(full.encode("utf-8", "surrogateescape")))

    def key(self, name: ObjectName, block_index: int) -> bytes:
        """Return the key of a block: `KEY_BYTES` characters."""
        digest = self._keyed(name.digest + _INDEX.pack(block_index))
        return base64.b64encode(digest[:_KEY_DIGEST_BYTES])

    def _keyed(self, data: bytes) -> bytes:
        return blake3(data, key=self._name_key).digest()

    def prefix(self, key: bytes, data: Buffer) -> bytes:
        """Return what stands before the bytes of a block in its value."""
        return bytes((FORMAT,)) + self._proof(key, data)

    def is_valid(self, key: bytes, prefix: Buffer, data: Buffer) -> bool:
        """Whether a value, of `prefix` and `data`, was written for this key with this secret."""
        return hmac.compare_digest(bytes(prefix), self.prefix(key, data))

    def _proof(self, key: bytes, data: Buffer) -> bytes:
        return blake3(key, key=self._proof_key).update(data).digest(PROOF_BYTES)


def hash_share(key: bytes) -> float:
    """Return a number from 0 up to 1 that depends on the key only, spread evenly over all keys."""
    return int.from_bytes(base64.b64decode(key[:4]), "big") / (1 << 24)
