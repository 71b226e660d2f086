"""Gives the blocks of a stored file to the cache, so that reading them back costs no request."""

from collections.abc import Callable

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import SpoolError
from cachefs.staging.extents import Source
from cachefs.types import BLOCK_BYTES, BlockKey, ObjectRef
from cachefs.writes.written_file import WrittenFile


async def give_to_cache(
    file: WrittenFile, ref: ObjectRef, cache: BlockCache, is_stored: Callable[[], bool]
) -> None:
    """Give the cache the blocks of `ref`, which is the content of the file. Ends early when
    `is_stored` says that the file has changed. Blocks that are only a hole are left out: a sparse
    file would fill the cache with zeros. Raises `SpoolError`."""
    index = 0
    while index < ref.block_count:
        try:
            offset = file.staged.data_from(index * BLOCK_BYTES)
            if offset is None:
                return
            index = offset // BLOCK_BYTES
            data = await _local_block(file, cache, index, ref.block_length(index))
        except SpoolError:
            if is_stored():
                raise
            return
        if not is_stored():
            return
        if data is not None:
            await cache.put_written(ref, index, data)
        index += 1


async def _local_block(
    file: WrittenFile, cache: BlockCache, index: int, length: int
) -> bytes | None:
    """Return a block of a file if it can be had without a request to the origin."""
    found: list[bytes] = []
    for piece in file.staged.pieces(index * BLOCK_BYTES, length):
        if piece.source is Source.SPOOL:
            found.append(await file.staged.read_spool(piece.offset, piece.length))
        elif piece.source is Source.ZEROS:
            found.append(bytes(piece.length))
        elif piece.source is Source.UPLOAD:
            return None
        else:
            assert file.base is not None
            key = BlockKey(file.base.ref.object_id, index)
            at = piece.offset - index * BLOCK_BYTES
            data = cache.read_block_now(key, at, piece.length)
            if data is None:
                return None
            found.append(bytes(data))
    return b"".join(found)
