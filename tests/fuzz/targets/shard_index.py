"""The index of a model (prefetch/shard_index.py), whose names are the same however it is cut."""

from cachefs.prefetch.shard_index import ShardIndex

GROWING = {
    "quotes": lambda count: b'"' * count,
    "one text": lambda count: b"a" * count,
    "names": lambda count: b"".join(b'"%08x.safetensors",' % n for n in range(count // 23)),
    "short texts": lambda count: b"".join(b'"%05x' % n for n in range(count // 6)),
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    whole, parts = ShardIndex(), ShardIndex()
    whole.add(data)
    step = 1 + len(data) % 50
    for at in range(0, len(data), step):
        parts.add(data[at : at + step])
    assert whole.names == parts.names
    for name in whole.names:
        assert len(name) <= 255
        assert not {0, *b'/\\"'} & {*name}


def _read(data: bytes) -> None:
    index = ShardIndex()
    for at in range(0, len(data), 64 << 10):
        index.add(data[at : at + (64 << 10)])


PARSERS = (_read,)
"""What is measured with `GROWING`, in the pieces in which `Shards` reads an index."""
