"""Routes about unsent files: `cachefs writes` and `cachefs flush`. A read-only mount answers that
it has none."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import trio

from cachefs.control import api
from cachefs.control.api import Handler, Lines, Route, UnknownError
from cachefs.control.routes.tree import parts_of
from cachefs.errors import NotFoundError, UsageError
from cachefs.foreign_numbers import whole_number
from cachefs.writes.background import BackgroundSends
from cachefs.writes.unsent.decisions import Decisions
from cachefs.writes.unsent.flush import Flushes, FlushFailure, is_below
from cachefs.writes.unsent.report import KEPT, UnsentFile, UnsentFiles

_LINES_PER_TURN = 500


class Unsent(NamedTuple):
    """The parts of a writable mount that know, send and drop its unsent files."""

    files: UnsentFiles
    decisions: Decisions
    flushes: Flushes
    background: BackgroundSends


class WritesRoutes:
    """The handlers of one mount."""

    def __init__(self, unsent: Unsent | None, refresh: Callable[[dict[str, Any]], Lines]) -> None:
        """`unsent` is None for a read-only mount. `refresh` answers `api.CACHE_REFRESH`."""
        self._unsent = unsent
        self._refresh = refresh

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {
            api.WRITES: self.all,
            api.WRITES_CONTENT: self.content,
            api.WRITES_DROP: self.drop,
            api.WRITES_SEND: self.send,
            api.WRITES_FLUSH: self.flush,
            api.WRITES_LEAVE: self.leave,
        }

    async def all(self, arguments: dict[str, Any]) -> Lines:
        """Yield a line about the spool, then one for each unsent file at or below the path
        `below`."""
        below = _normal(arguments.get("below", ""))
        if self._unsent is None:
            yield {"spool": None}
            return
        spool = self._unsent.files.spool
        yield {
            "spool": str(spool.space.root),
            "used_bytes": spool.space.used_bytes,
            "limit_bytes": spool.space.limit_bytes,
        }
        found = [file for file in self._unsent.files.all() if is_below(file.path, below)]
        for count, file in enumerate(found, 1):
            yield _shown(file)
            if count % _LINES_PER_TURN == 0:
                await trio.lowlevel.checkpoint()

    async def content(self, arguments: dict[str, Any]) -> Lines:
        """Yield a line about the unsent file `id`, then what makes up its content."""
        staged, reader = self._decisions().reader(_id(arguments))
        yield {
            "id": staged.number,
            "path": staged.path,
            "size_bytes": staged.size_bytes,
            "base_bytes": 0 if staged.base is None else staged.base_bytes,
            "freed_bytes": staged.freed_bytes,
            "file": str(self._writable().files.spool.file_path(staged.number)),
        }
        async with aclosing(reader.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    async def drop(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Drop the unsent file `id`. Answers with what it was."""
        number = _id(arguments)
        return _shown(await _known(self._decisions().drop(number)))

    async def send(self, arguments: dict[str, Any]) -> Lines:
        """Send the unsent file `id`; with `overwrite`, in place of what is there. Yields a line
        with what it was. A stream, because this may take long."""
        overwrite = arguments.get("overwrite", False)
        if not isinstance(overwrite, bool):
            raise UsageError("overwrite must be true or false")
        found = await _known(self._decisions().send(_id(arguments), overwrite=overwrite))
        if found.state in KEPT:
            # The mount does not know yet that the file is there.
            async with aclosing(self._refresh({"paths": [found.path]})) as lines:
                async for _ in lines:
                    pass
        yield _shown(found)

    async def flush(self, arguments: dict[str, Any]) -> Lines:
        """Send what is unsent at or below the `paths`, and yield the progress: lines with
        `sent_files`, `sent_bytes`, `left_files` and `left_bytes`, and a `failure` for each file
        that was not sent. The sends go on if the client disconnects. With `replace` (the default),
        they replace other versions as a close does."""
        paths = arguments.get("paths")
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UsageError("paths must be a list of texts")
        is_close = arguments.get("replace", True)
        if not isinstance(is_close, bool):
            raise UsageError("replace must be true or false")
        for number, path in enumerate(paths):
            below = _normal(path)
            if self._unsent is None:
                yield dict.fromkeys(_PROGRESS, 0)
                continue
            async with aclosing(self._unsent.flushes.flush(below, is_close=is_close)) as news:
                async for what in news:
                    if isinstance(what, FlushFailure):
                        rest = what.path[len(below) :].strip("/")
                        yield {"number": number, "path": rest, "failure": what.reason}
                    else:
                        yield {"number": number, **what._asdict()}

    async def leave(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Leave what is unsent in the spool when the mount ends; or try once to send it, with
        `leave` false."""
        leave = arguments.get("leave", True)
        if not isinstance(leave, bool):
            raise UsageError("leave must be true or false")
        if self._unsent is not None:
            self._unsent.background.leaves_rest = leave
        return {}

    def _writable(self) -> Unsent:
        if self._unsent is None:
            raise UnknownError("the mount is read-only, so it has no unsent files")
        return self._unsent

    def _decisions(self) -> Decisions:
        return self._writable().decisions


_PROGRESS = ("sent_files", "sent_bytes", "left_files", "left_bytes")


async def _known(answer: Awaitable[UnsentFile]) -> UnsentFile:
    try:
        return await answer
    except NotFoundError as error:
        raise UnknownError(str(error)) from None


def _shown(file: UnsentFile) -> dict[str, object]:
    return {
        "id": file.number,
        "path": file.path,
        "state": file.state.value,
        "size_bytes": file.size_bytes,
        "sent_bytes": file.sent_bytes,
        "reason": file.reason or None,
        "changed_at": file.changed_at,
        "next_try_s": file.next_try_s,
    }


def _normal(path: object) -> str:
    """Return a path below the mountpoint in its normal form. Raises `UsageError`."""
    if not isinstance(path, str):
        raise UsageError("a path must be a text")
    return "/".join(part.decode("utf-8", "surrogateescape") for part in parts_of(path))


def _id(arguments: dict[str, Any]) -> int:
    """Return the number of an unsent file. Raises `UsageError`."""
    number = arguments.get("id")
    known = whole_number(number) if isinstance(number, str) else number  # a text in a query
    if isinstance(known, bool) or not isinstance(known, int):
        raise UsageError(f"id must be a number, not {str(number)[:40]!r}")
    return known
