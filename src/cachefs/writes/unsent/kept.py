"""Reads staged files, also those that wait for a user, and changes nothing in them."""

import base64
from collections.abc import AsyncGenerator, Iterator, Mapping

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import NotFoundError, ObjectChangedError, SpoolError
from cachefs.namespace.namespace import Namespace
from cachefs.staging.extents import Source
from cachefs.staging.file_state import FileState, no_longer_here
from cachefs.staging.staged_file import StagedFile
from cachefs.types import BLOCK_BYTES

_STEP_BYTES = 64 << 20
"""How much of a file is described between two checks for other tasks."""


class StagedReader:
    """Reads one staged file. What was not written comes from the version of the object on which it
    is based, if that is still cached or at the origin."""

    def __init__(self, staged: StagedFile, namespace: Namespace, cache: BlockCache) -> None:
        self._staged = staged
        self._cache = cache
        base = staged.base
        self._ref = None if base is None else namespace.ref_at(staged.path, base)

    async def read(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range, which must be inside the file. Raises `SpoolError` or the
        origin's error."""
        found: list[bytes] = []
        for piece in self._staged.pieces(offset, length):
            if piece.source is Source.SPOOL:
                found.append(await self._staged.read_spool(piece.offset, piece.length))
            elif piece.source is Source.ZEROS:
                found.append(bytes(piece.length))
            elif piece.source is Source.UPLOAD:
                raise no_longer_here(self._staged.path, self._staged.freed_bytes)
            else:
                for at, some in _blocks(piece.offset, piece.length):
                    found.append(await self._read_base(at, some))
        return b"".join(found)

    async def _read_base(self, offset: int, length: int) -> bytes:
        """Return bytes of one block of the base."""
        assert self._ref is not None
        index, start = divmod(offset, BLOCK_BYTES)
        try:
            return bytes(await self._cache.read_block(self._ref, index, start, length))
        except (ObjectChangedError, NotFoundError) as error:
            number = self._staged.number
            raise ObjectChangedError(
                f"{self._staged.path}: only parts of it were written, and the version to which "
                f"they belong is gone ({error}); cachefs writes save {number} without a target "
                "shows where the parts are"
            ) from error

    async def pieces(self) -> AsyncGenerator[Mapping[str, object], None]:
        """Yield what makes up the file, in order: `offset`, `length` and `source`; for a piece of
        the base also its bytes in base64 as `data`. Raises `SpoolError` if the file changes
        meanwhile, and the origin's error."""
        staged, generation = self._staged, self._staged.generation
        for first in range(0, staged.size_bytes, _STEP_BYTES):
            for source, offset, length in staged.pieces(first, _STEP_BYTES):
                if source is Source.UPLOAD:
                    raise no_longer_here(staged.path, staged.freed_bytes)
                if source is not Source.BASE:
                    yield {"offset": offset, "length": length, "source": source.value}
                    continue
                for at, some in _blocks(offset, length):
                    text = base64.b64encode(await self._read_base(at, some)).decode()
                    yield {"offset": at, "length": some, "source": source.value, "data": text}
            await trio.lowlevel.checkpoint()
        if staged.generation != generation or staged.state is FileState.ENDED:
            raise SpoolError(f"{staged.path} has changed meanwhile; try again")


def _blocks(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Divide a range at the borders of blocks: yield offset and length of each part."""
    while length > 0:
        some = min(length, BLOCK_BYTES - offset % BLOCK_BYTES)
        yield offset, some
        offset += some
        length -= some
