"""Changes of names that concern each other, in every order: the answers of the origin are held."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    ExistsError,
    NotFoundError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.namespace.namespace import ROOT_INO
from cachefs.namespace.own_changes import OwnChanges
from cachefs.origin.writable import (
    MOST_PUT_BYTES,
    NO_ATTRIBUTES,
    Attributes,
    Condition,
    Content,
    PartTag,
    Upload,
    WritableOrigin,
    content_of,
)
from cachefs.staging.spool import Spool
from cachefs.types import NO_POSIX, ObjectMeta, ObjectRef, Posix
from cachefs.writes.block_copies import BlockCopies
from cachefs.writes.files import WrittenFiles
from cachefs.writes.naming.names import WrittenNames
from cachefs.writes.naming.present import Name
from cachefs.writes.sending.sender import Sender
from cachefs.writes.sending.timeouts import SendTimeoutError, SendTimeouts
from tests.namespace.harness import Reading, ScriptedOrigin


class ObjectStore:
    """The writer of a `ScriptedOrigin`; with `can_rename` it is a file system. `before` and `after`
    are awaited around each request, with its kind and path. If `after` raises, the answer is lost.
    """

    checks_parts = True

    def __init__(self, origin: ScriptedOrigin, can_rename: bool) -> None:
        self.can_rename = can_rename
        self._origin = origin
        self.before: Callable[[str, str], Awaitable[None]] | None = None
        self.after: Callable[[str, str], Awaitable[None]] | None = None
        self.requests: list[tuple[str, str]] = []
        self.uploads: dict[Upload, dict[int, bytes]] = {}
        self._write_ids: dict[str, str] = {}
        self._markers: dict[str, str | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(WritableOrigin, name)  # what an origin has unless it says otherwise

    @asynccontextmanager
    async def _request(self, kind: str, path: str) -> AsyncIterator[None]:
        self.requests.append((kind, path))
        await trio.lowlevel.checkpoint()
        if self.before is not None:
            await self.before(kind, path)
        yield
        if self.after is not None:
            await self.after(kind, path)

    def can_have(self, path: str) -> bool:
        return True

    def _check(self, path: str, condition: Condition | None) -> None:
        found = self._origin.objects.get(path)
        version = None if found is None else found.meta.version
        if condition is not None and condition.version != version:
            raise ConflictError(path)

    async def put(
        self,
        path: str,
        body: Any,
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        write_id: str | None = None,
    ) -> ObjectMeta:
        async with self._request("put", path):
            self._check(path, condition)
            meta = self._origin.put(
                path, bytes(content_of(body).read(0, content_of(body).size_bytes))
            )
            self._write_ids[meta.version] = write_id or ""
        return meta

    async def start_upload(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, write_id: str | None = None
    ) -> Upload:
        async with self._request("start", path):
            upload = Upload(path, str(len(self.requests)), write_id or "")
            self.uploads[upload] = {}
        return upload

    async def put_part(self, upload: Upload, number: int, offset: int, content: Content) -> PartTag:
        async with self._request("part", upload.path):
            self.uploads[upload][number] = bytes(content.read(0, content.size_bytes))
        return PartTag(number, content.size_bytes, "tag")

    async def complete(
        self,
        upload: Upload,
        parts: Sequence[PartTag],
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> ObjectMeta:
        async with self._request("complete", upload.path):
            self._check(upload.path, condition)
            found = self.uploads.pop(upload)
            meta = self._origin.put(upload.path, b"".join(found[part.number] for part in parts))
            self._write_ids[meta.version] = upload.write_id
        return meta

    async def abort(self, upload: Upload) -> None:
        self.uploads.pop(upload, None)

    async def abort_started(self, upload: Upload, began_s: float, ended_s: float) -> None:
        for each in [each for each in self.uploads if each.write_id == upload.write_id]:
            del self.uploads[each]

    async def written_by(self, path: str, write_id: str) -> ObjectMeta | None:
        found = self._origin.objects.get(path)
        is_own = found is not None and self._write_ids.get(found.meta.version) == write_id
        return found.meta if found is not None and is_own else None

    async def copy(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None = None,
        write_id: str | None = None,
    ) -> ObjectMeta:
        async with self._request("copy", path):
            if path not in self._origin.objects:
                raise NotFoundError(path)
            self._check(path, Condition(meta.version))
            self._check(target, condition)
            copied = self._origin.put(target, self._origin.expected(path))
        return copied

    async def rename(self, path: str, target: str, condition: Condition | None = None) -> None:
        async with self._request("rename", path):
            self._check(target, condition)
            found = self._origin.objects
            if not any(key == path or key.startswith(f"{path}/") for key in found):
                raise NotFoundError(path)
            for key in list(found):
                if key == path or key.startswith(f"{path}/"):
                    found[target + key.removeprefix(path)] = found.pop(key)

    async def delete(self, path: str, condition: Condition | None = None) -> None:
        async with self._request("delete", path):
            if path in self._origin.objects:
                self._check(path, condition)
                self._origin.delete(path)

    async def delete_many(self, paths: list[str]) -> dict[str, OriginError]:
        for path in paths:
            await self.delete(path)
        return {}

    async def make_directory(
        self,
        path: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        is_new: bool = False,
        write_id: str | None = None,
    ) -> None:
        async with self._request("mkdir", path):
            if is_new and self._markers.get(path, write_id) != write_id:
                raise ConflictError(path)
            self._markers[path] = write_id


class Mount:
    def __init__(
        self,
        reading: Reading,
        spool: Spool,
        store: ObjectStore,
        write_timeout_s: float = math.inf,
    ) -> None:
        self.tree = reading.tree
        self.origin = reading.origin
        self.store = store
        namespace, changes = self.tree.namespace, OwnChanges(self.tree.namespace)
        writer: Any = store
        self.cache = reading.cache
        self.sender = sender = Sender(writer, SendTimeouts(write_timeout_s))
        self.files = WrittenFiles(
            *(namespace, changes, reading.readers, reading.cache, spool, sender),
            marks=None,
            withdraw=lambda ino, block_count: None,
        )
        copies = BlockCopies(reading.cache)
        self.names = WrittenNames(
            *(namespace, changes, self.files, reading.readers, copies, self.origin, writer, 1000),
            mount_id="test",
        )

    async def create(self, parent: int, name: bytes) -> int:
        inode = await self.names.create(
            *(parent, name, NO_POSIX), exclusive=False, replaces=True, is_again=False
        )
        return inode.ino

    async def rename(self, old: tuple[int, bytes], new: tuple[int, bytes]) -> None:
        await self.names.rename(Name(*old), Name(*new), False, process=1)

    async def name_of(self, path: str) -> Name:
        inode = await self.tree.find(path)
        return Name(inode.parent, inode.name)

    def objects(self) -> dict[str, bytes]:
        return {path: self.origin.expected(path) for path in self.origin.objects}


@pytest.fixture(params=["object store", "file system"])
async def mount(
    request: pytest.FixtureRequest, reading: Reading, tmp_path: Path, nursery: trio.Nursery
) -> AsyncIterator[Mount]:
    spool = await Spool.open(tmp_path / "spool", reading.origin.identity, 1 << 30)
    await nursery.start(spool.run)
    store = ObjectStore(reading.origin, can_rename=request.param == "file system")
    yield Mount(reading, spool, store)
    await spool.close()


class Held:
    """A request of a kind that waits until `go` is set."""

    def __init__(self, store: ObjectStore, kind: str) -> None:
        self.has_come, self.go = trio.Event(), trio.Event()
        self._kind = kind
        store.before = self._hold

    async def _hold(self, kind: str, path: str) -> None:
        if kind == self._kind and not self.has_come.is_set():
            self.has_come.set()
            await self.go.wait()


@pytest.mark.parametrize("kind", ["directory", "file"])
async def test_a_rename_that_the_daemon_before_has_done_is_noted(mount: Mount, kind: str) -> None:
    """The kernel calls the inodes that it knows by the new name."""
    below = "/deep/a" if kind == "directory" else ""
    mount.origin.put(f"old{below}", b"content")
    inode, old = await mount.tree.find(f"old{below}"), await mount.tree.find("old")
    mount.origin.put(f"new{below}", b"content")
    mount.origin.delete(f"old{below}")
    with pytest.raises(NotFoundError):
        await mount.names.rename(
            Name(ROOT_INO, b"old"), Name(ROOT_INO, b"new"), False, process=1, is_again=True
        )
    assert (await mount.tree.find("new")).ino == old.ino
    table = mount.tree.namespace.table
    assert table.path(mount.tree.namespace.inode(inode.ino)) == f"new{below}"
    if kind == "file":
        assert (await mount.tree.find("new")).version == mount.origin.objects["new"].meta.version


async def test_a_store_that_still_deletes_for_a_killed_daemon(
    mount: Mount, autojump_clock: trio.testing.MockClock
) -> None:
    """What the rename of the daemon before has copied vanishes while this one copies the rest."""
    if mount.store.can_rename:
        return
    for name in "abc":
        mount.origin.put(f"old/{name}", name.encode())
    old = await mount.tree.find("old/a")
    mount.origin.put("new/a", b"a")

    async def delete_first(kind: str, path: str) -> None:
        if kind == "copy" and "old/a" in mount.origin.objects:
            mount.origin.put("new/b", b"b")
            mount.origin.put("new/c", b"c")
            for name in "abc":
                mount.origin.delete(f"old/{name}")

    mount.store.before = delete_first
    with pytest.raises(NotFoundError):  # the handler knows that this means success
        await mount.names.rename(
            Name(ROOT_INO, b"old"), Name(ROOT_INO, b"new"), False, process=1, is_again=True
        )
    table = mount.tree.namespace.table
    assert table.path(mount.tree.namespace.inode(old.ino)) == "new/a"
    assert mount.objects() == {"new/a": b"a", "new/b": b"b", "new/c": b"c"}


async def test_no_copy_goes_while_the_store_deletes_for_a_killed_daemon(mount: Mount) -> None:
    """The old objects vanish because they are moved, not because another client removes them."""
    if mount.store.can_rename:
        return
    for name in "abc":
        mount.origin.put(f"old/{name}", name.encode())
    inos = [(await mount.tree.find(f"old/{name}")).ino for name in "abc"]
    for name in "abc":
        mount.origin.objects[f"new/{name}"] = mount.origin.objects[f"old/{name}"]

    async def delete_some(kind: str, path: str) -> None:
        if kind == "mkdir":  # between its look at both names and the next one
            for name in "ab":
                mount.origin.delete(f"old/{name}")

    mount.store.before = delete_some
    await mount.names.rename(
        Name(ROOT_INO, b"old"), Name(ROOT_INO, b"new"), False, process=1, is_again=True
    )
    assert mount.objects() == {"new/a": b"a", "new/b": b"b", "new/c": b"c"}
    table = mount.tree.namespace.table
    paths = [table.path(mount.tree.namespace.inode(ino)) for ino in inos]
    assert paths == ["new/a", "new/b", "new/c"]


async def test_a_name_below_a_directory_changes_before_or_after_its_rename(mount: Mount) -> None:
    """The kernel does not lock a directory that is renamed within its parent."""
    for name in "abc":
        mount.origin.put(f"old/{name}", name.encode())
    old = await mount.tree.find("old")
    names = {name: await mount.name_of(f"old/{name}") for name in "abc"}
    step = Held(mount.store, "rename" if mount.store.can_rename else "delete")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.rename, (ROOT_INO, b"old"), (ROOT_INO, b"new"))
        await step.has_come.wait()
        nursery.start_soon(mount.rename, names["a"], Name(old.ino, b"moved"))
        nursery.start_soon(mount.names.unlink, *names["b"])
        nursery.start_soon(mount.create, old.ino, b"made")
        await trio.testing.wait_all_tasks_blocked()
        step.go.set()
    assert mount.objects() == {"new/c": b"c", "new/moved": b"a"}
    assert await mount.tree.names(old.ino) == ["c", "made", "moved"]


@pytest.mark.parametrize("name", ["old/a", "old/new"])
async def test_a_file_below_a_directory_is_sent_before_or_after_its_rename(
    mount: Mount, name: str
) -> None:
    """Its close waits: otherwise the rename would delete what it has just stored."""
    mount.origin.put("old/a", b"before")
    old, parts = await mount.tree.find("old"), name.split("/")
    step = Held(mount.store, "rename" if mount.store.can_rename else "delete")
    ino = await mount.create(old.ino, b"new")
    if name == "old/a":
        ino = (await mount.tree.find(name)).ino

    async def write_and_close() -> None:
        await mount.files.truncate(ino, 0, 1)
        await mount.files.write(ino, 0, b"after", 1)
        await mount.files.send(ino, is_close=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.rename, (ROOT_INO, b"old"), (ROOT_INO, b"new"))
        await step.has_come.wait()
        nursery.start_soon(write_and_close)
        await trio.testing.wait_all_tasks_blocked()
        step.go.set()
    assert mount.objects() == {"new/a": b"before"} | {f"new/{parts[1]}": b"after"}
    found = await mount.tree.find(f"new/{parts[1]}")
    assert found.ino == ino
    assert found.version == mount.origin.objects[f"new/{parts[1]}"].meta.version


async def test_a_rename_waits_for_changes_below(mount: Mount) -> None:
    for name in "ab":
        mount.origin.put(f"old/{name}", name.encode())
    old = await mount.tree.find("old")
    below = await mount.name_of("old/a")
    copy = Held(mount.store, "rename" if mount.store.can_rename else "copy")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.rename, below, Name(old.ino, b"moved"))
        await copy.has_come.wait()
        nursery.start_soon(mount.rename, (ROOT_INO, b"old"), (ROOT_INO, b"new"))
        await trio.testing.wait_all_tasks_blocked()
        copy.go.set()
    assert mount.objects() == {"new/b": b"b", "new/moved": b"a"}


async def test_two_renames_never_wait_for_each_other(mount: Mount) -> None:
    """Each needs the locks of the same two unsent files, and comes to them in another order."""
    directory = (
        await mount.names.make_directory(ROOT_INO, b"old", NO_POSIX, is_again=False, process=1)
    ).ino
    mount.origin.put("old/c", b"")  # an origin without markers has no empty directory
    for name in (b"a", b"b"):
        ino = await mount.create(directory, name)
        await mount.files.write(ino, 0, name, 1)
    first = mount.files.entry((await mount.tree.find("old/a")).ino)
    assert first is not None
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, first.lock:
            nursery.start_soon(mount.rename, (ROOT_INO, b"old"), (ROOT_INO, b"new"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(mount.rename, (directory, b"b"), (directory, b"a"))
            await trio.testing.wait_all_tasks_blocked()
    left = await mount.tree.find("new/a")
    assert await mount.files.read(left.ino, 0, 10) == b"b"
    assert "b" not in await mount.tree.names(directory)


async def test_a_name_is_made_after_its_removal_has_ended(mount: Mount) -> None:
    """The process that removes it was killed, so the kernel lets the next one make it at once."""
    mount.origin.put("file", b"old")
    await mount.tree.find("file")
    deletion = Held(mount.store, "delete")
    made: list[int] = []

    async def make() -> None:
        made.append(await mount.create(ROOT_INO, b"file"))
        await mount.files.write(made[0], 0, b"new", 1)
        await mount.files.send(made[0], is_close=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.names.unlink, ROOT_INO, b"file")
        await deletion.has_come.wait()
        nursery.start_soon(make)
        await trio.testing.wait_all_tasks_blocked()
        deletion.go.set()
    assert mount.objects() == {"file": b"new"}
    assert (await mount.tree.find("file")).ino == made[0]


def lose_answers(store: ObjectStore) -> None:
    async def lose(kind: str, path: str) -> None:
        if kind == "put":
            store.after = None
            raise OriginUnavailableError("the answer is lost")

    store.after = lose


async def send_and_lose(mount: Mount, ino: int) -> None:
    lose_answers(mount.store)
    with pytest.raises(OriginUnavailableError):
        await mount.files.send(ino, is_close=True)


async def test_a_sending_that_fails_just_before_a_rename(mount: Mount) -> None:
    """The store has its object, although the answer was lost: it must not stay at the old name."""
    ino = await mount.create(ROOT_INO, b"old")
    await mount.files.write(ino, 0, b"content", 1)
    file = mount.files.entry(ino)
    assert file is not None
    async with trio.open_nursery() as nursery, file.lock:  # both wait for it, in this order
        nursery.start_soon(send_and_lose, mount, ino)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(mount.rename, (ROOT_INO, b"old"), (ROOT_INO, b"new"))
        await trio.testing.wait_all_tasks_blocked()
    assert mount.objects() == {"new": b"content"}


@pytest.mark.parametrize("then", ["remove", "rename", "send again"])
async def test_a_replaced_file_may_be_at_the_store(mount: Mount, then: str) -> None:
    """Its sending has failed, but the store has it: so the next changes of the name know of it."""
    replaced, ino = [await mount.create(ROOT_INO, name) for name in (b"file", b"new")]
    await mount.files.write(replaced, 0, b"replaced", 1)
    await mount.files.write(ino, 0, b"content", 1)
    await send_and_lose(mount, replaced)
    assert mount.objects() == {"file": b"replaced"}
    await mount.rename((ROOT_INO, b"new"), (ROOT_INO, b"file"))
    match then:
        case "remove":
            await mount.names.unlink(ROOT_INO, b"file")
            assert mount.objects() == {}
        case "rename":
            await mount.rename((ROOT_INO, b"file"), (ROOT_INO, b"other"))
            assert mount.objects() == {}
        case "send again":
            await mount.files.send(ino, is_close=False)
            assert mount.objects() == {"file": b"content"}


async def test_a_replaced_file_that_has_replaced_one_of_the_store(mount: Mount) -> None:
    mount.origin.put("file", b"old")
    await mount.tree.find("file")
    for name in (b"one", b"two"):
        await mount.create(ROOT_INO, name)
        await mount.rename((ROOT_INO, name), (ROOT_INO, b"file"))
    assert mount.objects() == {"file": b"old"}
    await mount.names.unlink(ROOT_INO, b"file")
    assert mount.objects() == {}


async def test_a_mkdir_that_the_kernel_sends_again_knows_its_own_directory(mount: Mount) -> None:
    """The daemon was killed before it received the answer. Another process has not made it."""

    async def lose(kind: str, path: str) -> None:
        raise OriginUnavailableError("the answer is lost")

    async def make(process: int, *, is_again: bool) -> None:
        make = mount.names.make_directory
        await make(ROOT_INO, b"dir", NO_POSIX, is_again=is_again, process=process)

    mount.store.after = lose
    with pytest.raises(OriginUnavailableError):
        await make(7, is_again=False)
    mount.store.after = None
    with pytest.raises(ExistsError):
        await make(8, is_again=True)
    await make(7, is_again=True)
    assert (await mount.tree.find("dir")).is_dir
    with pytest.raises(ExistsError):
        await make(7, is_again=False)


LARGE = bytes(MOST_PUT_BYTES) + b"the end"


async def large(mount: Mount, name: bytes) -> int:
    """A new file that is not closed, and is sent in parts."""
    ino = await mount.create(ROOT_INO, name)
    for offset in range(0, len(LARGE), 1 << 20):
        await mount.files.write(ino, offset, LARGE[offset : offset + (1 << 20)], 1)
    return ino


@pytest.mark.parametrize("how", ["removed", "replaced", "renamed", "renamed with its directory"])
async def test_a_name_changes_while_its_large_file_is_sent(
    mount: Mount, nursery: trio.Nursery, how: str
) -> None:
    """The change does not wait for the bytes. The close ends without an error."""
    nursery.start_soon(mount.files.run)
    mount.origin.put("a/there", b"there")
    parent = (await mount.tree.find("a")).ino
    other = await mount.create(ROOT_INO, b"other")
    await mount.files.write(other, 0, b"other", 1)
    ino = await large(mount, b"large")
    if how == "renamed with its directory":
        await mount.rename((ROOT_INO, b"large"), (parent, b"large"))
    held = Held(mount.store, "part")
    async with trio.open_nursery() as closing:
        closing.start_soon(mount.files.close, ino, 1)
        await held.has_come.wait()
        match how:
            case "removed":
                await mount.names.unlink(ROOT_INO, b"large")
            case "replaced":
                await mount.rename((ROOT_INO, b"other"), (ROOT_INO, b"large"))
                await mount.files.close(other, 1)
            case "renamed":
                await mount.rename((ROOT_INO, b"large"), (ROOT_INO, b"new"))
            case _:
                await mount.rename((ROOT_INO, b"a"), (ROOT_INO, b"new"))
    expected = {
        "removed": {},
        "replaced": {"large": b"other"},
        "renamed": {"new": LARGE},
        "renamed with its directory": {"new/large": LARGE},
    }
    place = "new" if how == "renamed with its directory" else "a"
    assert mount.objects() == expected[how] | {f"{place}/there": b"there"}
    await trio.testing.wait_all_tasks_blocked()
    assert mount.store.uploads == {}


async def test_attributes_are_set_while_a_large_file_is_sent(mount: Mount) -> None:
    ino = await large(mount, b"large")
    held = Held(mount.store, "part")
    async with trio.open_nursery() as closing:
        closing.start_soon(mount.files.close, ino, 1)
        await held.has_come.wait()
        await mount.names.set_attributes(ino, Posix(mode=0o600), 5, None)
        held.go.set()
    assert mount.objects() == {"large": LARGE}
    assert [kind for kind, _ in mount.store.requests].count("start") == 1, "it is sent once"
    inode = mount.tree.namespace.inode(ino)
    assert (inode.posix.mode, inode.mtime_ns) == (0o600, 5)


async def refuse_old(kind: str, path: str) -> None:
    if (kind, path) == ("delete", "old"):
        raise AccessDeniedError("no")


async def lose_answer(kind: str, path: str) -> None:
    if (kind, path) == ("delete", "old"):
        raise OriginUnavailableError("no answer")


@pytest.mark.parametrize("mount", ["object store"], indirect=True)
@pytest.mark.expect_log("old was not renamed: it could not be deleted")
async def test_a_rename_of_a_file_that_can_not_be_deleted_is_undone(mount: Mount) -> None:
    mount.origin.put("old", b"content")
    await mount.tree.find("old")
    mount.store.before = refuse_old
    with pytest.raises(AccessDeniedError):
        await mount.rename((ROOT_INO, b"old"), (ROOT_INO, b"new"))
    assert mount.objects() == {"old": b"content"}
    mount.store.before = lose_answer  # it may still be deleted, so the copy stays
    with pytest.raises(OriginUnavailableError):
        await mount.rename((ROOT_INO, b"old"), (ROOT_INO, b"new"))
    assert mount.objects() == {"old": b"content", "new": b"content"}


@pytest.mark.parametrize("mount", ["object store"], indirect=True)
async def test_a_rename_whose_last_answer_is_lost_succeeds(mount: Mount) -> None:
    mount.origin.put("old", b"content")
    await mount.tree.find("old")
    mount.store.after = lose_answer
    await mount.rename((ROOT_INO, b"old"), (ROOT_INO, b"new"))
    assert mount.objects() == {"new": b"content"}


@pytest.fixture
async def timed(reading: Reading, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Mount]:
    """A mount of an object store with a short write timeout."""
    spool = await Spool.open(tmp_path / "timed", reading.origin.identity, 1 << 30)
    store = ObjectStore(reading.origin, can_rename=False)
    mount = Mount(reading, spool, store, write_timeout_s=0.2)
    nursery.start_soon(mount.files.run)
    yield mount
    await spool.close()


async def test_one_deadline_for_all_that_a_close_waits_for(timed: Mount) -> None:
    """Here for parts that are sent ahead and get no answer. The file is sent later."""
    held = Held(timed.store, "part")
    ino = await large(timed, b"large")
    await held.has_come.wait()
    with pytest.raises(SendTimeoutError):
        await timed.files.close(ino, 1)
    assert list(timed.files.generations_to_send()) == [ino]
    held.go.set()
    await timed.files.send(ino, is_close=False)
    assert timed.objects() == {"large": LARGE}


async def test_a_close_waits_while_the_origin_takes_bytes(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    timeouts, moved_s = SendTimeouts(15), 0.0

    async def close() -> None:
        nonlocal moved_s
        with timeouts.limited("file"):
            for _ in range(5):
                await trio.sleep(10)
                timeouts.note_moved()
            moved_s = trio.current_time()
            await trio.sleep_forever()

    nursery.start_soon(timeouts.run)
    await trio.sleep(100)
    with pytest.raises(SendTimeoutError):
        await close()
    assert 15 <= trio.current_time() - moved_s < 16


@pytest.mark.parametrize("is_new", [True, False])
async def test_holes_of_a_sparse_file_are_not_put_into_the_cache(
    reading: Reading, timed: Mount, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """1 TiB with some bytes would fill it with zeros. Of a changed object the new bytes count."""
    put: list[int] = []

    async def noting(ref: ObjectRef, index: int, data: bytes) -> None:
        put.append(index)

    monkeypatch.setattr(reading.cache, "put_written", noting)
    if is_new:
        ino = await timed.create(ROOT_INO, b"sparse")
    else:
        timed.origin.put("sparse", b"base")
        ino = (await timed.tree.find("sparse")).ino
    await timed.files.write(ino, 9 << 20, b"here", 1)
    await timed.files.truncate(ino, 15 << 20, 1)
    await timed.files.close(ino, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert put == ([9] if is_new else [0, 9]), "block 0 has bytes of the base"
