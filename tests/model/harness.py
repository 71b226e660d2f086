"""Random operations on a mount without a kernel, and a reference that judges every answer.

Time is a clock that stands still but for `advance`, and for a nanosecond at every look at it. The
reference keeps, for every path, what stood there since when; "shown at T with a TTL left" must
have been true at some moment of the last TTL before the answer runs out.
"""

import math
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.db import Database
from cachefs.errors import (
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginUnavailableError,
)
from cachefs.format.inode_record import TABLES, Inode
from cachefs.namespace.namespace import ROOT_INO, Namespace, Ttls
from cachefs.namespace.reader import Readers
from cachefs.types import ObjectMeta
from tests.namespace.harness import NS, Kernel, ScriptedOrigin, WallClock

NAMES = ("a", "b", "a-")
PATHS = (*NAMES, "a/a", "a/b")
ABSENT, DIRECTORY = "absent", "directory"
State = str | ObjectMeta
"""What stands at a path: `ABSENT`, `DIRECTORY`, or a version of an object."""

SLACK_NS = 1_000_000
"""The clock's own nanoseconds."""

Operation = tuple
Interference = tuple[str, Operation]
"""(which request: "stat", "page" or "read"; what happens in the middle of it)."""


class History:
    """What stood at every path, since when."""

    def __init__(self, origin: ScriptedOrigin, clock: WallClock) -> None:
        self._origin = origin
        self._clock = clock
        self._states: dict[str, list[tuple[int, State]]] = {
            path: [(0, ABSENT)] for path in PATHS
        } | {"": [(0, DIRECTORY)]}
        self.contents: dict[tuple[str, str], bytes] = {}

    def note(self) -> None:
        """The origin has changed: write down what stands there now."""
        now_ns = self._clock.now_ns()
        for path in PATHS:
            state = self._state(path)
            if self._states[path][-1][1] != state:
                self._states[path].append((now_ns, state))
            if isinstance(state, ObjectMeta):
                self.contents[path, state.version] = self._origin.expected(path)

    def _state(self, path: str) -> State:
        found = self._origin.objects.get(path)
        if found is not None and found.meta.size_bytes:
            return found.meta
        if any(key.startswith(path + "/") for key in self._origin.objects):
            return DIRECTORY
        return ABSENT if found is None else found.meta

    def now(self, path: str) -> State:
        return self._states[path][-1][1]

    def between(self, path: str, first_ns: float, last_ns: float) -> list[State]:
        """All that stood there at some moment from `first_ns` to `last_ns`."""
        states = self._states[path]
        return [
            state
            for index, (since_ns, state) in enumerate(states)
            if since_ns <= last_ns
            and (index + 1 == len(states) or states[index + 1][0] >= first_ns)
        ]


@dataclass
class Handle:
    """A file that somebody has open."""

    inode: Inode
    path: str


class Model:
    """The mount, the reference, and the operations on both."""

    def __init__(
        self,
        directory: Path,
        nursery: trio.Nursery,
        ttls: Ttls,
        page_size: int,
        is_outlived: bool = False,
        shows_trees: bool = False,
    ) -> None:
        """`is_outlived`: the kernel, and what it has open, outlive restarts and crashes."""
        self._is_outlived = is_outlived
        self._directory = directory
        self._nursery = nursery
        self._ttls = ttls
        self.clock = WallClock()
        self.origin = ScriptedOrigin(page_size=page_size)
        self.origin.shows_trees = shows_trees
        self.history = History(self.origin, self.clock)
        self.handles: list[Handle] = []
        self.kernel = Kernel(self.clock)
        self.told: set[tuple[int, bytes]] = set()
        self._owners: dict[int, tuple[str, str]] = {}
        """Inode number to (path, version), over the whole life of the cache directory."""
        self._interferences: list[Interference] = []
        self._interfering = False
        self._failures: list[AssertionError] = []
        self.origin.after_stat = lambda path: self._interfere("stat")
        self.origin.before_page = lambda path, number: self._interfere("page")
        self.origin.on_read = lambda path, offset, length: self._interfere("read")
        self.db: Database
        self.namespace: Namespace
        self.cache: BlockCache
        self.readers: Readers

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        tier = CacheDirectory.open(
            self._directory / "cache", 64 << 20, self.origin.identity, free_space_ratio=0.0
        )
        self.cache = BlockCache(self.origin, [tier])
        await self._nursery.start(self.cache.run)
        self.db = Database.open(str(self._directory / "namespace"), TABLES, 1 << 26)
        if not self._is_outlived:  # what a kernel has kept goes with its mount
            self.kernel = Kernel(self.clock)
        self.namespace = Namespace(
            self.db,
            self.origin,
            self._nursery,
            self._ttls,
            self.clock,
            self._on_unbound,
            self.kernel.invalidate_attributes,
        )
        self.kernel.namespace = self.namespace
        if not self._is_outlived:
            self.namespace.table.purge_unnamed()
            self.namespace.validators.are_shown = True
            self.handles = []
        await self.db.commit()
        if self._is_outlived:
            self.namespace.outlive()
        self.readers = Readers(self.namespace, self.cache, 8 << 20)

    def _on_unbound(self, parent: int, name: bytes) -> None:
        self.told.add((parent, name))

    async def stop(self, crash: bool = False) -> None:
        """A crash loses what was not committed; with both stores in one process, the cache is
        closed in order all the same (tests/crash is about its crashes)."""
        with trio.fail_after(300):
            listings = self.namespace._listings
            while self.namespace._look_ups or listings._running or listings._stale:
                await trio.testing.wait_all_tasks_blocked()
        await self.cache.aclose()
        if crash:
            self.db.abandon()
        else:
            self.db.close()

    async def run(self, operations: list[Operation]) -> None:
        await self.start()
        for operation, interferences in operations:
            self._interferences = list(interferences)
            with trio.fail_after(300):
                await self.apply(operation)
            for failure in self._failures:
                raise failure
        await self.stop()

    async def _interfere(self, kind: str) -> None:
        if self._interfering:
            return
        for index, (wanted, operation) in enumerate(self._interferences):
            if wanted == kind:
                del self._interferences[index]
                self._interfering = True
                try:
                    await self.apply(operation)
                except AssertionError as error:
                    self._failures.append(error)  # the namespace would swallow it
                finally:
                    self._interfering = False
                return

    # -- operations ----------------------------------------------------------------------------

    async def apply(self, operation: Operation) -> None:
        name, *arguments = operation
        method: Callable[..., Awaitable[None]] = getattr(self, f"do_{name}")
        await method(*arguments)

    async def do_put(self, path: str, size: int) -> None:
        """Create, replace, grow, shrink; a file in place of a directory, too."""
        parent = path.rpartition("/")[0]
        if parent and isinstance(self.history.now(parent), ObjectMeta):
            self.origin.delete(parent)
        self.origin.delete_tree(path)
        fill = b"%d." % (self.origin.puts + 1)
        self.origin.put(path, (fill * (size // len(fill) + 1))[:size])
        self.history.note()

    async def do_put_beside(self, path: str, size: int) -> None:
        """A key that may be object and prefix at once."""
        self.origin.put(path, b"?" * size)
        self.history.note()

    async def do_delete(self, path: str) -> None:
        self.origin.delete_tree(path)
        self.history.note()

    async def do_then(self, first: Operation, second: Operation) -> None:
        await self.apply(first)
        await self.apply(second)

    async def do_advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def do_commit(self) -> None:
        await self.db.commit()

    async def do_restart(self, crash: bool) -> None:
        if not self._interfering:
            await self.stop(crash)
            await self.start()

    async def do_fail(self) -> None:
        """The next request fails."""
        self.origin.fail_next(1, ObjectChangedError("on demand"))

    async def do_outage(self, down: bool) -> None:
        """From now on every request fails, or none. Names may be stale until the mount has found
        out (a second at least, so in practice until it is restarted)."""
        self.origin.down = OriginUnavailableError("on demand") if down else None

    def _since_ns(self, since_ns: float) -> float:
        """When an answer must have been right, if this is so for one that isn't stale."""
        return 0 if self.namespace.outage.is_on else since_ns

    def _judge_error(self, error: Exception) -> None:
        assert str(error) == "on demand", repr(error)

    async def do_lookup(self, path: str) -> None:
        await self.find(path)

    async def find(self, path: str) -> Inode | None:
        """Walk the path as the kernel does, and judge each step."""
        inode = self.namespace.inode(ROOT_INO)
        walked = ""
        for part in path.split("/"):
            walked = f"{walked}/{part}" if walked else part
            parent = inode.ino
            began_ns = self.clock.now_ns()
            try:
                inode, ttl_s = await self.namespace.lookup(parent, part.encode())
            except NotFoundError:
                self._judge_absence(parent, walked, began_ns)
                return None
            except (ObjectChangedError, OriginUnavailableError) as error:
                self._judge_error(error)
                return None
            self.namespace.write_ahead()
            self._judge_presence(inode, walked, ttl_s, began_ns)
            if not inode.is_dir:
                if walked == path:
                    self.handles.append(Handle(inode, walked))
                    del self.handles[:-8]
                return inode
        return inode

    async def do_list(self, path: str, limit: int) -> None:
        """Read a directory, not always to its end; then what it showed is judged."""
        inode = await self.find(path) if path else self.namespace.inode(ROOT_INO)
        if inode is None or not inode.is_dir:
            return
        began_ns = self.clock.now_ns()
        # A listing under way is shared, however long ago it began.
        is_shared = self._is_listed(inode.ino)
        snapshot = self.namespace.open_directory(inode.ino)
        shown: set[str] = set()
        try:
            while len(shown) < limit and await snapshot.has(len(shown)):
                self._judge_entry(inode.ino, path, snapshot, len(shown), shown)
        except (NotFoundError, NotADirError):
            self._judge_no_directory(path, began_ns)
            return
        except (ObjectChangedError, OriginUnavailableError) as error:
            self._judge_error(error)
            return
        if len(shown) == limit:
            return
        now_ns = self.clock.now_ns()
        oldest_ns = self._since_ns(began_ns - self._ttls.list_s * NS - SLACK_NS)
        assert is_shared or snapshot.as_of_ns >= oldest_ns
        for name in set(NAMES) - shown:
            child = f"{path}/{name}" if path else name
            if child in PATHS:
                states = self.history.between(child, snapshot.as_of_ns - SLACK_NS, now_ns)
                assert ABSENT in states, f"{child!r} was there all along: {states}"

    def _is_listed(self, ino: int) -> bool:
        """Whether a listing of the directory is under way, which a reader would join."""
        return ino in self.namespace._listings._running

    def _judge_no_directory(self, path: str, began_ns: int) -> None:
        states = self.history.between(path, began_ns, self.clock.now_ns())
        assert any(state != DIRECTORY for state in states), f"{path!r} was there all along"

    async def do_ls(self, path: str) -> None:
        """Read a directory through a kernel that keeps it whole, and through restarts."""
        inode = await self.find(path) if path else self.namespace.inode(ROOT_INO)
        if inode is None or not inode.is_dir:
            return
        began_ns = self.clock.now_ns()
        is_shared = self._is_listed(inode.ino)
        try:
            kept = await self.kernel.read(inode.ino)
        except (NotFoundError, NotADirError):
            self._judge_no_directory(path, began_ns)
            return
        except (ObjectChangedError, OriginUnavailableError) as error:
            self._judge_error(error)
            return
        now_ns = self.clock.now_ns()
        oldest_ns = self._since_ns(began_ns - self._ttls.list_s * NS - SLACK_NS)
        if not is_shared and began_ns > kept.read_at_ns + NS + SLACK_NS:
            # Not just read. What was stale then may be believed for a second, others for the TTL.
            assert kept.as_of_ns >= oldest_ns, "kept for too long"
        since_ns = self._since_ns(kept.as_of_ns - SLACK_NS)
        for name in NAMES:
            child = f"{path}/{name}" if path else name
            if child in PATHS:
                states = self.history.between(child, since_ns, now_ns)
                is_absent = name.encode() not in kept.entries
                assert any((state == ABSENT) == is_absent for state in states), child

    def _judge_entry(
        self, parent: int, path: str, snapshot, position: int, shown: set[str]
    ) -> None:
        name, listed = snapshot.entry(position)
        text = name.decode()
        assert text not in shown, "twice in one listing"
        shown.add(text)
        ino = self.namespace.listed_ino(parent, name, listed, snapshot)
        if ino is None:
            return
        child = f"{path}/{text}" if path else text
        inode = self.namespace.inode(ino)
        now_ns = self.clock.now_ns()
        self._judge_owner(inode, child)
        # The kernel may believe it for the TTL that is given with it ...
        ttl_s = self.namespace.snapshot_ttl_s(snapshot)
        until_ns = now_ns + ttl_s * NS
        since_ns = until_ns - self._ttls.entry_s * NS
        if ttl_s == 0:
            # ... and without one it was true when the listing began, or later.
            since_ns = snapshot.as_of_ns
        self._judge_state(inode, child, since_ns, now_ns)

    def _judge_presence(self, inode: Inode, path: str, ttl_s: float, began_ns: int) -> None:
        now_ns = self.clock.now_ns()
        self._judge_owner(inode, path)
        assert 0 <= ttl_s <= self._ttls.entry_s
        since_ns = min(began_ns, now_ns + ttl_s * NS - self._ttls.entry_s * NS)
        self._judge_state(inode, path, since_ns, now_ns)

    def _judge_state(self, inode: Inode, path: str, since_ns: float, now_ns: int) -> None:
        states = self.history.between(path, self._since_ns(since_ns) - SLACK_NS, now_ns)
        if inode.is_dir:
            assert DIRECTORY in states, f"{path!r} was no directory: {states}"
            return
        metas = [state for state in states if isinstance(state, ObjectMeta)]
        found = [meta for meta in metas if meta.version == inode.version]
        assert found, f"{path!r} was not {inode.version} within the TTL: {states}"
        assert found[0].size_bytes == inode.size_bytes
        assert found[0].mtime_ns == inode.mtime_ns

    def _judge_absence(self, parent: int, path: str, began_ns: int) -> None:
        now_ns = self.clock.now_ns()
        name = path.rpartition("/")[2].encode()
        ttl_s = self.namespace.negative_ttl_s(parent, name)
        bound_s = max(self._ttls.negative_s, self._ttls.list_s)
        assert 0 <= ttl_s <= bound_s
        since_ns = min(began_ns, now_ns + (ttl_s - bound_s) * NS) - SLACK_NS
        states = self.history.between(path, self._since_ns(since_ns), now_ns)
        assert ABSENT in states, f"{path!r} was there all along: {states}"

    def _judge_owner(self, inode: Inode, path: str) -> None:
        """Inode numbers are never used for two things; an inode never changes."""
        if inode.ino == ROOT_INO:
            return
        owner = (path, DIRECTORY if inode.is_dir else inode.version)
        assert self._owners.setdefault(inode.ino, owner) == owner

    async def do_read(self, which: int, offset: int, size: int) -> None:
        """Read from one of the files that are open, whatever became of their names."""
        if not self.handles:
            return
        handle = self.handles[which % len(self.handles)]
        inode = handle.inode
        wanted = self.history.contents[handle.path, inode.version][offset : offset + size]
        began_ns = self.clock.now_ns()
        try:
            reader = self.readers.get(inode.ino)
            data = reader.read_now(offset, size)
            if data is None:
                data = await self.readers.read(reader, offset, size)
        except (ObjectChangedError, OriginUnavailableError) as error:
            if "on demand" in str(error):
                return
            states = self.history.between(handle.path, began_ns, self.clock.now_ns())
            current = [s.version if isinstance(s, ObjectMeta) else s for s in states]
            assert set(current) != {inode.version}, "the version is there, and could not be read"
            return
        assert bytes(data) == wanted, "torn, or of another version"

    async def do_cat(self, path: str, offset: int, size: int) -> None:
        """Look up and read, as most programs do."""
        inode = await self.find(path)
        if inode is not None and not inode.is_dir:
            await self.do_read(-1, offset, size)


def play(
    operations: list[Operation],
    ttls: Ttls,
    page_size: int = 2,
    is_outlived: bool = False,
    shows_trees: bool = False,
) -> None:
    """Run all operations on a mount in a directory of its own. Raises what is wrong."""

    async def main() -> None:
        where = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=where) as directory:
            try:
                async with trio.open_nursery() as nursery:
                    model = Model(
                        Path(directory), nursery, ttls, page_size, is_outlived, shows_trees
                    )
                    await model.run(operations)
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                error: BaseException = group
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                raise error from None

    trio.run(main)


FOREVER = math.inf
