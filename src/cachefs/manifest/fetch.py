"""Get a local file for a manifest that a user names by a path or a URL."""

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio
import xxhash

from cachefs.errors import CachefsError, NotFoundError, UsageError
from cachefs.format.manifest_record import MANIFEST_FORMAT
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import open_origin
from cachefs.origin.options import OriginOptions
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.trusted_path import open_file
from cachefs.types import ObjectMeta
from cachefs.units import format_bytes

_PIECE_BYTES = 8 << 20
MOST_FETCHED_BYTES = 8 << 30
"""The largest manifest that is copied from a URL, into the directory for temporary files."""


@asynccontextmanager
async def local_copy(manifest: str, source: str, options: OriginOptions) -> AsyncIterator[Path]:
    """Yield the path of the manifest as a local file; a copy lasts as long as the context.

    `options` are those of the mounted `source`. They are used for the manifest too if its URL has
    the same scheme. Raises `CachefsError`.
    """
    if "://" not in manifest:
        yield Path(manifest)
        return
    scheme, _, rest = manifest.partition("://")
    above, _, name = rest.rpartition("/")
    if not name:
        raise UsageError(f"manifest {manifest}: this is the URL of a directory, not of a file")
    is_same = scheme == source.partition("://")[0]
    settings = options if is_same else OriginOptions(max_threads=options.max_threads)
    inner = open_origin(f"{scheme}://{above or '/'}", replace(settings, verify_origin="off"))
    origin = ResilientOrigin(inner, Resilience())
    descriptor, path = tempfile.mkstemp(prefix="cachefs-manifest-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            await _download(origin, name, manifest, file.fileno())
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await origin.aclose()


async def _download(origin: Origin, name: str, manifest: str, descriptor: int) -> None:
    try:
        found = await origin.stat(name)
        if not isinstance(found, ObjectMeta):
            raise NotFoundError(f"{manifest} is a directory")
        if found.size_bytes > MOST_FETCHED_BYTES:
            raise UsageError(
                f"{manifest} has {format_bytes(found.size_bytes)}, and a manifest from a URL may "
                f"have {format_bytes(MOST_FETCHED_BYTES)}; split it, or name a local copy"
            )
        for offset in range(0, found.size_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, found.size_bytes - offset)
            data = await origin.read(name, found, offset, length)
            await trio.to_thread.run_sync(_write_all, descriptor, memoryview(data))
    except CachefsError as error:
        raise type(error)(f"can't read the manifest: {error}") from error
    except OSError as error:
        raise CachefsError(f"can't keep a copy of the manifest: {error.strerror}") from error


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`: a disk that becomes full takes a part first. Raises `OSError`."""
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def digest_of(file: Path, name: str, *others: str) -> str:
    """Return a digest of 32 hex digits. It covers the content of the manifest, the manifest format
    and `others`, which also decide how the content is parsed. Errors call the manifest `name`.
    Blocks. Raises `CachefsError`."""
    digest = xxhash.xxh3_128("\0".join((str(MANIFEST_FORMAT), *others)).encode(errors="replace"))
    try:
        with os.fdopen(open_file(file), "rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        reason = error.strerror or error
        raise CachefsError(f"can't read the manifest {name}: {reason}") from error
    return digest.hexdigest()
