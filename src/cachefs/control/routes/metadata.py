"""Routes for metadata snapshots: `cachefs metadata`."""

from collections.abc import Iterator, Mapping
from typing import Any

import trio

from cachefs.control import api
from cachefs.control.api import Handler, Lines, Route
from cachefs.db import Database
from cachefs.errors import CachefsError, UsageError
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.transfer import KnownEntry, MetadataImport, Piece, known_pieces, known_root
from cachefs.origin.base import Origin
from cachefs.types import Posix

_PIECE_TYPES: tuple[Any, ...] = (str, str, bool, (int, type(None)), list)


class MetadataRoutes:
    """Exports and imports a mount's metadata of its source. All handlers raise `CachefsError`s."""

    def __init__(
        self, namespace: Namespace, db: Database, origin: Origin, manifest: str | None
    ) -> None:
        """With a `manifest` the mount shows only a part of the source, and refuses both routes."""
        self._db = db
        self._clock = namespace.clock
        self._origin = origin
        self._manifest = manifest
        self._import = MetadataImport(namespace, db)

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route."""
        return {api.METADATA_EXPORT: self.export, api.METADATA_IMPORT: self.take}

    async def export(self, arguments: dict[str, Any]) -> Lines:
        """Stream all known metadata. The first line has `identity`, `source`, `exported_at_ns`,
        `entries` (their approximate number) and `root`; each further line is a `Piece`."""
        self._refuse_manifest()
        await self._db.commit()
        snapshot = self._db.snapshot()
        try:
            yield {
                "identity": self._origin.identity,
                "source": self._origin.url,
                "exported_at_ns": self._clock.now_ns(),
                "entries": snapshot.count("dirents"),
                "root": await trio.to_thread.run_sync(known_root, snapshot),
            }
            pieces = known_pieces(snapshot)
            while (piece := await trio.to_thread.run_sync(_next, pieces)) is not None:
                yield piece._asdict()
        finally:
            snapshot.close()

    async def take(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Import `pieces` of the source `identity`, and the `root`, which comes with the first of
        them. Answer with `bound`, the number of names that are new or have changed."""
        self._refuse_manifest()
        identity = arguments.get("identity")
        if identity != self._origin.identity:
            raise CachefsError(
                f"this is metadata of {identity}, and the mount is of {self._origin.identity}"
            )
        pieces = arguments.get("pieces")
        if not isinstance(pieces, list):
            raise UsageError("pieces must be a list")
        if arguments.get("root") is not None:
            root = _entry(arguments["root"])
            await self._import.import_root(Posix(root.uid, root.gid, root.mode))
        bound = 0
        for piece in pieces:
            bound += await self._import.import_piece(_piece(piece))
        return {"bound": bound}

    def _refuse_manifest(self) -> None:
        if self._manifest is not None:
            raise CachefsError(
                "this mount shows what a manifest names; metadata are exchanged between mounts "
                "of the whole source"
            )


def _next(pieces: Iterator[Piece]) -> Piece | None:
    return next(pieces, None)


def _piece(fields: Any) -> Piece:
    if isinstance(fields, dict) and [*fields] == [*Piece._fields]:
        piece = Piece(**fields)
        if all(map(isinstance, piece, _PIECE_TYPES)):
            return piece
    raise UsageError(f"a piece has, in this order, {', '.join(Piece._fields)}")


def _entry(fields: Any) -> KnownEntry:
    """Return the entry. This doesn't check single values: `MetadataImport` does."""
    try:
        return KnownEntry._make(fields)
    except TypeError:
        raise UsageError(f"an entry is invalid: {str(fields)[:100]}") from None
