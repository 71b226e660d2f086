"""Look-ups of the same name at the same time share one request to the origin."""

import logging
from collections.abc import Awaitable, Callable

import trio

from cachefs.errors import CachefsError
from cachefs.format.inode_record import Inode

log = logging.getLogger(__name__)


class _LookUp:
    """One request to the origin that several look-ups may wait for."""

    __slots__ = ("done", "error", "inode")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: CachefsError | None = None
        self.inode: Inode | None = None


class SharedLookUps:
    """The look-ups that are under way, by directory and name; owned by its `Namespace`."""

    def __init__(
        self, nursery: trio.Nursery, observe: Callable[[int, bytes], Awaitable[Inode]]
    ) -> None:
        """`observe(parent, name)` asks the origin for a name, and raises `CachefsError`s."""
        self._nursery = nursery
        self._observe = observe
        self._under_way: dict[tuple[int, bytes], _LookUp] = {}

    def __bool__(self) -> bool:
        return bool(self._under_way)

    async def ask(self, parent: int, name: bytes) -> Inode:
        """Ask the origin for a name, and return its inode. Concurrent look-ups share one request,
        which continues even if some of them are cancelled. Each receives its own copy of the
        error."""
        key = (parent, name)
        look_up = self._under_way.get(key)
        if look_up is None:
            look_up = self._under_way[key] = _LookUp()
            self._nursery.start_soon(self._run, key, look_up)
        await look_up.done.wait()
        if look_up.error is not None:
            raise type(look_up.error)(str(look_up.error))
        assert look_up.inode is not None
        return look_up.inode

    async def _run(self, key: tuple[int, bytes], look_up: _LookUp) -> None:
        try:
            look_up.inode = await self._observe(*key)
        except CachefsError as error:
            look_up.error = error
        except Exception:
            # A bug here gives an error to the waiting look-ups, but must not end the mount.
            log.exception("bug while looking up %r in inode %d", key[1], key[0])
        finally:
            # However this ended, no look-up may wait for ever.
            if look_up.inode is None and look_up.error is None:
                look_up.error = CachefsError("the look-up was broken off")
            del self._under_way[key]
            look_up.done.set()
