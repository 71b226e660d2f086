"""Renames a directory of an object store, which has no rename: copies, and then deletes.

At any time one of the two names has all objects:

1. The objects below the old name are listed and copied, `_AT_A_TIME` at a time.
2. Listings verify the copies. What was changed below the old name meanwhile is copied, too.
3. The objects below the old name are deleted.

If a step before the third fails, the copies are removed. If the store refuses to delete, what was
deleted is copied back before. If it only gave no answer, it may still delete, so nothing is undone:
the rename fails, and the new name has all objects. If the daemon dies, the kernel sends the
request again: the listings of both names show the next daemon how far this one has come. The store
may still delete old objects for the dead daemon then, so the next one removes no copy.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import trio

from cachefs.errors import (
    ConflictError,
    NotEmptyError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
    TooManyError,
)
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.origin.base import Origin
from cachefs.origin.writable import ABSENT, WritableOrigin
from cachefs.types import ObjectMeta, ObjectRef
from cachefs.writes.sending.sender import attributes_of

_AT_A_TIME = 64
_DELETED_TOGETHER = 1000
_ROUNDS = 5
"""The most times that the old name is listed, because other writers change it meanwhile."""
_UNDO_S = 30.0
_PUT_BACK_S = 300.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Copied(NamedTuple):
    """A file below a renamed directory: its object under the old name, and its new version."""

    ino: int
    before: ObjectRef
    path: str
    meta: ObjectMeta


class DirectoryRename:
    """One rename of a directory. `run` does it at the origin; the names here do not change."""

    def __init__(
        self,
        namespace: Namespace,
        origin: Origin,
        writer: WritableOrigin,
        paths: tuple[str, str],
        most_keys: int,
    ) -> None:
        """`paths` are the old and the new one. More than `most_keys` objects and directories are
        refused."""
        self._namespace = namespace
        self._origin = origin
        self._writer = writer
        self._old, self._new = paths
        self._most_keys = most_keys
        self.directories: list[Inode] = []
        """The directories below the old name."""
        self._copied: dict[str, Copied] = {}
        """By the old path."""
        self._begun: set[str] = set()
        """The paths that this rename may have made."""
        self._is_again = False
        """An earlier daemon may have begun, and the store may still do what that one has sent: it
        deletes the old objects. So this one removes no copy, whatever it finds."""

    async def run(self, directory: Inode, *, has_target: bool, is_again: bool) -> list[Copied]:
        """Do it, and return the files that were moved.

        `has_target`: the new name is a directory already. It must be empty, unless `is_again`: an
        earlier daemon may have begun, and made some of the copies. Raises `ConflictError` if there
        is something of the new name although `has_target` is false, `TooManyError`,
        `NotEmptyError`, `ObjectChangedError`, or the origin's error; the old name then has all
        objects.
        """
        self._is_again = is_again
        below = await self._below(directory)
        if is_again:
            await self._take_over(below)
        try:
            await self._make_top(directory, has_target, is_again)
            await self._copy(directory, below)
        except BaseException as error:
            await self._undo(error)
            raise
        markers = [f"{self._namespace.table.path(child)}/" for child in self.directories]
        await self._delete(directory, [*self._copied, *reversed(markers), f"{self._old}/"])
        return list(self._copied.values())

    async def _make_top(self, directory: Inode, has_target: bool, is_again: bool) -> None:
        """Make the directory of the new name. Raises `ConflictError` if somebody has just made it:
        then it is not this rename's, and stays."""
        is_new = not (has_target or is_again)
        attributes = attributes_of(directory.posix)
        await self._writer.make_directory(self._new, attributes, is_new=is_new)
        if not has_target:
            self._begun.add(f"{self._new}/")

    def _target(self, path: str) -> str:
        return self._new + path[len(self._old) :]

    async def _below(self, directory: Inode) -> dict[str, tuple[int, ObjectRef]]:
        """List the directory and all directories below. Return the objects by path. Raises
        `TooManyError`, or the listing's error."""
        found: dict[str, tuple[int, ObjectRef]] = {}
        self.directories = []
        waiting = [directory.ino]
        since_ns = self._namespace.clock.now_ns()
        while waiting:
            ino = waiting.pop()
            snapshot = await self._namespace.listed_since(ino, since_ns)
            for position in range(len(snapshot)):
                name, _ = snapshot.entry(position)
                dirent = self._namespace.table.dirent(ino, name)
                if dirent is None:
                    continue
                child = self._namespace.inode(dirent.ino)
                if child.is_dir:
                    self.directories.append(child)
                    waiting.append(child.ino)
                elif child.version:
                    ref = self._namespace.object_ref(child)
                    found[ref.path] = (child.ino, ref)
            if len(found) + len(self.directories) > self._most_keys:
                raise TooManyError(
                    f"{self._old} has more than {self._most_keys} objects, which would have to be "
                    "copied one by one: copy it with the tools of the store, or raise "
                    "--rename-limit"
                )
        return found

    # -- copies ------------------------------------------------------------------------------------

    async def _copy(self, directory: Inode, below: dict[str, tuple[int, ObjectRef]]) -> None:
        """Copy what is below the old name, until a listing shows nothing that is not copied."""
        for _ in range(_ROUNDS):
            await self._make_directories(
                [(self._target(self._namespace.table.path(at)), at) for at in self.directories]
            )
            missing = [one for path, one in below.items() if not self._is_copied(path, one[1])]
            await _in_parallel(self._copy_one, missing)
            below = await self._below(directory)
            if not self._is_again:
                await self._drop_copies([path for path in self._copied if path not in below])
            if all(self._is_copied(path, ref) for path, (_, ref) in below.items()):
                await self._verify()
                return
        raise ObjectChangedError(f"{self._old} keeps changing while it is renamed")

    def _is_copied(self, path: str, ref: ObjectRef) -> bool:
        copied = self._copied.get(path)
        return copied is not None and copied.before.meta.version == ref.meta.version

    async def _copy_one(self, one: tuple[int, ObjectRef]) -> None:
        ino, ref = one
        target = self._target(ref.path)
        self._begun.add(target)
        with suppress(ObjectChangedError, NotFoundError):  # the next listing shows what it is now
            meta = await self._writer.copy(ref.path, ref.meta, target)
            self._copied[ref.path] = Copied(ino, ref, target, meta)

    async def _drop_copies(self, paths: list[str]) -> None:
        """Remove the copies of objects that other writers have deleted meanwhile."""
        targets = [self._copied.pop(path).path for path in paths]
        for error in (await self._delete_together(targets)).values():
            raise error

    async def _make_directories(self, wanted: Sequence[tuple[str, Inode]]) -> None:
        async def make(one: tuple[str, Inode]) -> None:
            path, directory = one
            if f"{path}/" not in self._begun:
                self._begun.add(f"{path}/")
                await self._writer.make_directory(path, attributes_of(directory.posix))

        await _in_parallel(make, wanted)

    async def _verify(self) -> None:
        """Compare the copies with listings of the new name. Raises `ObjectChangedError`."""
        found = await self._listed_below(self._new)
        for copied in self._copied.values():
            meta = found.get(copied.path)
            if meta is None or _differ(meta, copied.meta):
                raise ObjectChangedError(f"{copied.path} is not the copy that was made")

    async def _listed_below(self, top: str) -> dict[str, ObjectMeta]:
        """Return the objects below a directory by path, as the origin lists them now."""
        found: dict[str, ObjectMeta] = {}
        level = [top]

        async def list_one(path: str) -> None:
            try:
                async for page in self._origin.list_dir(path):
                    for entry in page:
                        if isinstance(entry.meta, ObjectMeta):
                            found[f"{path}/{entry.name}"] = entry.meta
                        else:
                            deeper.append(f"{path}/{entry.name}")
            except NotFoundError:
                return

        while level:
            deeper: list[str] = []
            await _in_parallel(list_one, level)
            level = deeper
        return found

    async def _take_over(self, below: dict[str, tuple[int, ObjectRef]]) -> None:
        """Find out what an earlier daemon has copied. Raises `NotEmptyError` if the new name has
        objects that are not from this rename."""
        found = await self._listed_below(self._new)
        sizes = {path: meta.size_bytes for path, meta in found.items()}
        wanted = {self._target(path): ref.meta.size_bytes for path, (_, ref) in below.items()}
        # It died while it copied (some copies are missing), or while it deleted (no copy is).
        if not (sizes.items() <= wanted.items() or wanted.items() <= sizes.items()):
            raise NotEmptyError(f"{self._new} is not empty")
        for path, (ino, ref) in below.items():
            meta = found.get(self._target(path))
            if meta is not None and not _differ(meta, ref.meta):
                self._copied[path] = Copied(ino, ref, self._target(path), meta)

    # -- the end -----------------------------------------------------------------------------------

    async def _undo(self, error: BaseException) -> None:
        """Remove the copies, as far as that is possible."""
        if not self._begun or self._is_again:
            return
        left = len(self._begun)
        with trio.CancelScope(shield=True), trio.move_on_after(_UNDO_S):
            left = len(await self._delete_together(sorted(self._begun, reverse=True)))
        log.warning(
            "%s was not renamed to %s, and still has all its files (%s); %s",
            self._old,
            self._new,
            str(error) or type(error).__name__,
            "the copies are removed" if not left else f"up to {left} copies could not be removed",
        )

    async def _delete(self, directory: Inode, paths: list[str]) -> None:
        """Delete what is below the old name. Raises the error of an object that could not be
        deleted, when the rename is undone as far as that is safe."""
        failed = await self._delete_together(paths)
        if not failed:
            return
        is_answer = not any(isinstance(each, OriginUnavailableError) for each in failed.values())
        path, error = next(iter(failed.items()))
        is_whole = False
        if is_answer and not self._is_again:
            with trio.CancelScope(shield=True), trio.move_on_after(_PUT_BACK_S):
                is_whole = await self._put_back(directory)
        if is_whole:
            await self._undo(error)
        else:
            log.warning(
                "%s was not renamed: %s has all its files, but %d objects of the old name could "
                "not be deleted, such as %s: %s",
                self._old,
                self._new,
                len(failed),
                path,
                error,
            )
        raise error

    async def _put_back(self, directory: Inode) -> bool:
        """Copy back what was deleted below the old name. Return whether a listing then shows that
        it has all its objects."""
        directories = [directory, *self.directories]
        try:
            for at in directories:
                path = self._namespace.table.path(at)
                await self._writer.make_directory(path, attributes_of(at.posix))
            found = await self._listed_below(self._old)
            missing = [one for path, one in self._copied.items() if path not in found]
            await _in_parallel(self._put_one_back, missing)
            found = await self._listed_below(self._old)
        except OriginError as error:
            log.info("%s can't be put back: %s", self._old, error)
            return False
        return found.keys() >= self._copied.keys()

    async def _put_one_back(self, copied: Copied) -> None:
        with suppress(ConflictError):  # somebody has made a new one
            await self._writer.copy(copied.path, copied.meta, copied.before.path, ABSENT)

    async def _delete_together(self, paths: list[str]) -> dict[str, OriginError]:
        """Delete objects, 1,000 in a request. Return the errors by path."""
        failed: dict[str, OriginError] = {}

        async def delete(some: list[str]) -> None:
            try:
                failed.update(await self._writer.delete_many(some))
            except OriginError as error:
                failed.update(dict.fromkeys(some, error))

        starts = range(0, len(paths), _DELETED_TOGETHER)
        await _in_parallel(delete, [paths[at : at + _DELETED_TOGETHER] for at in starts])
        return failed


def _differ(one: ObjectMeta, other: ObjectMeta) -> bool:
    return (one.size_bytes, one.version) != (other.size_bytes, other.version)


async def _in_parallel(do: Callable[[T], Awaitable[None]], wanted: Sequence[T]) -> None:
    """Call `do` for each, `_AT_A_TIME` at a time. After an error of the origin no more are begun,
    and it is raised."""
    failures: list[OriginError] = []
    left = iter(wanted)

    async def work() -> None:
        for one in left:
            try:
                await do(one)
            except OriginError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(min(_AT_A_TIME, len(wanted))):
            nursery.start_soon(work)
    if failures:
        raise failures[0]
