"""The rename of a directory of an object store: at any time one of the names has all objects."""

from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    NotEmptyError,
    NotFoundError,
    OriginError,
    OriginUnavailableError,
    TooManyError,
)
from cachefs.origin.writable import NO_ATTRIBUTES, Attributes, Condition
from cachefs.types import ObjectMeta
from cachefs.writes.naming.directory_rename import Copied, DirectoryRename
from tests.namespace.harness import ScriptedOrigin, Tree


class MemoryWriter:
    """What a rename needs of a `WritableOrigin`, on the objects of a `MemoryOrigin`."""

    def __init__(self, origin: ScriptedOrigin) -> None:
        self._origin = origin
        self.markers: set[str] = set()
        self.copying = self.most_copying = 0
        self.deletions: list[int] = []
        self.undeletable: dict[str, OriginError] = {}
        self.before_copy: Callable[[str], Awaitable[None]] | None = None
        self.before_deletion: Callable[[], Awaitable[None]] | None = None

    async def copy(
        self, path: str, meta: ObjectMeta, target: str, condition: Condition | None = None
    ) -> ObjectMeta:
        if condition is not None and target in self._origin.objects:
            raise ConflictError(target)
        self.copying += 1
        self.most_copying = max(self.most_copying, self.copying)
        try:
            await trio.sleep(0.001)
            if self.before_copy is not None:
                await self.before_copy(path)
        finally:
            self.copying -= 1
        if path not in self._origin.objects:
            raise NotFoundError(path)
        return self._origin.put(target, self._origin.expected(path), meta.version)

    async def delete_many(self, paths: Sequence[str]) -> dict[str, OriginError]:
        self.deletions.append(len(paths))
        if self.before_deletion is not None:
            await self.before_deletion()
        failed = {}
        for path in paths:
            if (error := self.undeletable.get(path)) is not None:
                failed[path] = error
                continue
            self._origin.objects.pop(path, None)
            self.markers.discard(path)
        return failed

    async def make_directory(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, *, is_new: bool = False
    ) -> None:
        if is_new and (f"{path}/" in self.markers or below(self._origin, path)):
            raise ConflictError(path)
        self.markers.add(f"{path}/")


@pytest.fixture
def writer(origin: ScriptedOrigin) -> MemoryWriter:
    return MemoryWriter(origin)


def fill(origin: ScriptedOrigin, count: int) -> dict[str, bytes]:
    """Make `count` objects in three directories below `old`. Return what `new` is to have."""
    wanted = {}
    for number in range(count):
        name = ("", "a/", "a/b/")[number % 3] + f"file-{number}"
        content = f"content {number}".encode()
        origin.put(f"old/{name}", content)
        wanted[f"new/{name}"] = content
    return wanted


def below(origin: ScriptedOrigin, directory: str) -> dict[str, bytes]:
    paths = [path for path in origin.objects if path.startswith(f"{directory}/")]
    return {path: origin.expected(path) for path in paths}


async def rename(
    tree: Tree, writer: MemoryWriter, most: int = 1000, *, has_target=False, is_again=False
) -> list[Copied]:
    directory = await tree.find("old")
    change = DirectoryRename(tree.namespace, tree.origin, writer, ("old", "new"), most)
    return await change.run(directory, has_target=has_target, is_again=is_again)


async def test_objects_are_copied_many_at_a_time_and_deleted_together(tree, origin, writer) -> None:
    wanted = fill(origin, 300)
    copied = await rename(tree, writer)
    assert below(origin, "new") == wanted
    assert below(origin, "old") == {}
    assert {one.path for one in copied} == set(wanted)
    assert writer.markers == {"new/", "new/a/", "new/a/b/"}
    assert 1 < writer.most_copying <= 64
    assert writer.deletions == [303]


async def test_too_many_objects_are_refused_before_the_first_copy(tree, origin, writer) -> None:
    fill(origin, 30)
    with pytest.raises(TooManyError, match="more than 31 objects"):  # and two directories
        await rename(tree, writer, most=31)
    assert below(origin, "new") == {}
    assert writer.markers == set()
    await rename(tree, writer, most=32)


@pytest.mark.expect_log("old was not renamed to new, and still has all its files .no .; the copies")
async def test_after_a_failed_copy_the_old_name_is_whole(tree, origin, writer) -> None:
    fill(origin, 200)
    before = below(origin, "old")

    async def fail(path: str) -> None:
        if path.endswith("-150"):
            raise OriginError("no ")

    writer.before_copy = fail
    with pytest.raises(OriginError, match="no "):
        await rename(tree, writer)
    assert below(origin, "old") == before
    assert below(origin, "new") == {}
    assert writer.markers == set()


@pytest.mark.expect_log("still has all its files")
async def test_an_empty_directory_that_was_there_stays_after_a_failure(
    tree, origin, writer
) -> None:
    fill(origin, 3)
    writer.markers.add("new/")

    async def fail(path: str) -> None:
        raise OriginError("no")

    writer.before_copy = fail
    with pytest.raises(OriginError):
        await rename(tree, writer, has_target=True)
    assert writer.markers == {"new/"}


@pytest.mark.parametrize("made", ["new/", "new/theirs"])
async def test_a_directory_that_another_machine_has_just_made_stays(
    tree, origin, writer, made
) -> None:
    fill(origin, 3)
    if made.endswith("/"):
        writer.markers.add(made)
    else:
        origin.put(made, b"theirs")
    with pytest.raises(ConflictError):
        await rename(tree, writer)
    assert len(below(origin, "old")) == 3
    assert list(below(origin, "new")) == ([] if made.endswith("/") else [made])
    assert writer.markers == ({made} if made.endswith("/") else set())


async def test_what_others_change_meanwhile_is_copied_too(tree, origin, writer) -> None:
    wanted = fill(origin, 20)

    async def change(path: str) -> None:
        writer.before_copy = None
        origin.put("old/file-0", b"another version")
        origin.put("old/a/added", b"added")
        origin.delete("old/a/file-1")

    writer.before_copy = change
    await rename(tree, writer)
    del wanted["new/a/file-1"]
    wanted |= {"new/file-0": b"another version", "new/a/added": b"added"}
    assert below(origin, "new") == wanted
    assert below(origin, "old") == {}


def copy(origin: ScriptedOrigin, paths: Sequence[str]) -> None:
    """Make the copies at these new paths, as an earlier daemon has."""
    for path in paths:
        old = f"old{path.removeprefix('new')}"
        origin.put(path, origin.expected(old), origin.objects[old].meta.version)


async def test_the_daemon_before_died_while_it_copied(tree, origin, writer) -> None:
    wanted = fill(origin, 100)
    copy(origin, list(wanted)[:40])
    copied = await rename(tree, writer, has_target=True, is_again=True)
    assert below(origin, "new") == wanted
    assert below(origin, "old") == {}
    assert len(copied) == 100


async def test_the_daemon_before_died_while_it_deleted(tree, origin, writer) -> None:
    wanted = fill(origin, 100)
    copy(origin, list(wanted))
    for number in range(0, 100, 2):
        origin.objects.pop(f"old/{('', 'a/', 'a/b/')[number % 3]}file-{number}")
    copied = await rename(tree, writer, has_target=True, is_again=True)
    assert below(origin, "new") == wanted
    assert below(origin, "old") == {}
    assert len(copied) == 50
    assert writer.most_copying == 0


async def test_what_somebody_else_has_put_there_is_kept(tree, origin, writer) -> None:
    wanted = fill(origin, 10)
    copy(origin, list(wanted)[:4])
    origin.put("new/foreign", b"of somebody else")
    with pytest.raises(NotEmptyError):
        await rename(tree, writer, has_target=True, is_again=True)
    assert len(below(origin, "new")) == 5
    assert len(below(origin, "old")) == 10


@pytest.mark.expect_log("old was not renamed to new, and still has all its files .no.; the copies")
async def test_a_rename_is_undone_if_an_old_object_can_not_be_deleted(tree, origin, writer) -> None:
    fill(origin, 30)
    before = below(origin, "old")
    writer.undeletable["old/a/file-4"] = AccessDeniedError("no")
    with pytest.raises(AccessDeniedError):
        await rename(tree, writer)
    assert below(origin, "old") == before
    assert below(origin, "new") == {}
    assert writer.markers == {"old/", "old/a/", "old/a/b/"}


@pytest.mark.expect_log("old was not renamed: new has all its files, but 1 objects of the old name")
async def test_a_rename_whose_deletions_get_no_answer_fails_and_loses_nothing(
    tree, origin, writer
) -> None:
    """The store may still delete what it was asked to delete, so nothing is undone."""
    wanted = fill(origin, 30)
    writer.undeletable["old/a/file-4"] = OriginUnavailableError("away")
    with pytest.raises(OriginUnavailableError):
        await rename(tree, writer)
    assert below(origin, "new") == wanted
    assert list(below(origin, "old")) == ["old/a/file-4"]
