"""Says from the first bytes of a file how likely its reader is to load all of it.

Readers of model weights nearly always read the whole file, in any order. Readers of a database or
of a file of columns often need only a part, and that part may have long runs, too.
"""

_MOST_HEAD_BYTES = 100_000_000
"""The limit of safetensors itself for the length of its head."""
HEAD_BYTES = 512
"""How many bytes `share_before_load` needs."""

UNKNOWN_SHARE = 0.25
_WEIGHTS_SHARE, _PARTS_SHARE = 0.0, 0.5


def share_before_load(head: bytes, size_bytes: int) -> float:
    """Return which share of the file must have been read in long runs before it counts as being
    loaded; 0 for weights. `head` are its first `HEAD_BYTES`, or fewer. They come from outside and
    may say anything."""
    if _is_safetensors(head, size_bytes) or head.startswith(b"GGUF") or _is_torch(head):
        return _WEIGHTS_SHARE
    if head.startswith((b"PAR1", b"ARROW1", b"ORC")) or _is_lmdb(head):
        return _PARTS_SHARE
    return UNKNOWN_SHARE


def _is_safetensors(head: bytes, size_bytes: int) -> bool:
    """Eight bytes with the length of a JSON object, and the object
    (https://github.com/huggingface/safetensors#format)."""
    length = int.from_bytes(head[:8], "little")
    fits = 2 <= length <= min(_MOST_HEAD_BYTES, size_bytes - 8)
    return fits and head[8:9] == b"{"


def _is_torch(head: bytes) -> bool:
    """A ZIP whose first member is the `data.pkl` of torch.save (caffe2/serialize/inline_container.h
    in pytorch). The name stands 30 bytes after the begin, its length in the four bytes before."""
    if not head.startswith(b"PK\3\4"):
        return False
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return name.endswith(b"/data.pkl")


def _is_lmdb(head: bytes) -> bool:
    """The magic number of the first meta page, after the page's header of 16 bytes (mdb.c)."""
    return head[16:20] in (b"\xde\xc0\xef\xbe", b"\xbe\xef\xc0\xde")
