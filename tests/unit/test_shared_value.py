"""Keys and values of the shared tier: golden bytes (docs/formats/shared_value.md)."""

import random

import pytest

from cachefs.format.shared_value import (
    KEY_BYTES,
    PREFIX_BYTES,
    SharedFormat,
    hash_share,
)

IDENTITY, PATH, VERSION = "s3://bucket/prefix", "a/b.jpg", '"0cc175b9c0f1b6a8"'


@pytest.mark.parametrize(
    ("secret", "block_index", "key", "group"),
    [
        (b"", 0, b"+MdZA3ACv6QIN0yJ3jozaI21", 0x48710ABCD3BE8CB0),
        (b"", 7, b"vCBCetz9T5mj0N0tQfwTbWTG", 0x48710ABCD3BE8CB0),
        (b"", 8, b"HYXIrcIlINM8OgV/rRSQN60e", 0xFCF5E4D6DE3BE20D),
        (b"secret", 0, b"pC88Y+I2quqW3rczDIQJSAau", 0x66DC899F3D45D872),
    ],
)
def test_golden_keys(secret: bytes, block_index: int, key: bytes, group: int) -> None:
    shared_format = SharedFormat(secret)
    name = shared_format.name(IDENTITY, PATH, VERSION)
    assert shared_format.key(name, block_index) == key
    assert name.group(block_index) == group
    assert len(key) == KEY_BYTES


@pytest.mark.parametrize(
    ("secret", "proof"),
    [(b"", "ac561bc225530f88dd3373524833c521"), (b"secret", "40f6b5d2b44d4b47115d731d1c3bb46e")],
)
def test_golden_values(secret: bytes, proof: str) -> None:
    shared_format = SharedFormat(secret)
    key = shared_format.key(shared_format.name(IDENTITY, PATH, VERSION), 0)
    prefix = shared_format.prefix(key, b"hello")
    assert prefix.hex() == "01" + proof
    assert len(prefix) == PREFIX_BYTES
    assert shared_format.is_valid(key, prefix, memoryview(b"hello"))


def test_mounts_of_different_prefixes_have_the_same_keys() -> None:
    shared_format = SharedFormat(b"")
    names = {
        shared_format.name("s3://bucket/prefix", "a/b.jpg", VERSION),
        shared_format.name("s3://bucket/", "prefix/a/b.jpg", VERSION),
        shared_format.name("s3://bucket/prefix/a", "b.jpg", VERSION),
    }
    assert len(names) == 1


def test_another_version_path_store_or_secret_has_another_key() -> None:
    names = [
        (b"", IDENTITY, PATH, VERSION),
        (b"", IDENTITY, PATH, '"1"'),
        (b"", IDENTITY, "a/b.jpeg", VERSION),
        (b"", "s3+other://bucket/prefix", PATH, VERSION),
        (b"x", IDENTITY, PATH, VERSION),
        (b"", IDENTITY, "\udcff", VERSION),
        (b"", IDENTITY, "\u00ff", VERSION),
    ]
    keys = set()
    for secret, *parts in names:
        shared_format = SharedFormat(secret)
        keys.add(shared_format.key(shared_format.name(*parts), 0))
    assert len(keys) == len(names)


def test_every_changed_byte_is_noticed() -> None:
    shared_format = SharedFormat(b"secret")
    name = shared_format.name(IDENTITY, PATH, VERSION)
    key, data = shared_format.key(name, 0), random.Random(1).randbytes(3000)
    prefix = shared_format.prefix(key, data)
    for at in range(0, PREFIX_BYTES + len(data), 37):
        value = bytearray(prefix + data)
        value[at] ^= 1
        assert not shared_format.is_valid(key, value[:PREFIX_BYTES], value[PREFIX_BYTES:])
    other = shared_format.key(name, 1)
    assert not shared_format.is_valid(other, prefix, data)
    assert not SharedFormat(b"Secret").is_valid(key, prefix, data)
    assert not shared_format.is_valid(key, prefix, data + b"x")


def test_hashes_are_spread_evenly() -> None:
    shared_format = SharedFormat(b"")
    name = shared_format.name(IDENTITY, PATH, VERSION)
    below = sum(hash_share(shared_format.key(name, index)) < 0.25 for index in range(4000))
    assert 850 < below < 1150
