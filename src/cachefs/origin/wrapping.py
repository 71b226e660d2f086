"""`WrappingOrigin`: the base class of origins that change what another origin does."""

from collections.abc import Callable, Sequence

from cachefs.origin.base import Origin
from cachefs.types import READER_TURN, Buffer, ObjectMeta, Reply, Turn


class WrappingOrigin(Origin):
    """Passes on what `inner` says of itself, and the requests for bytes.

    A subclass defines `stat` and `list_dir`. All other methods that give metadata call these two,
    as in `Origin`, so none of them goes past the subclass. For the same reason `read_body` calls
    `read`. What is said of reads in flight (`held_back_at` and the like) is not passed on: only the
    cache asks for it, and it asks `ResilientOrigin`.
    """

    def __init__(self, inner: Origin) -> None:
        self._inner = inner
        self.url = inner.url
        self.identity = inner.identity
        self.counters = inner.counters
        self.learned = inner.learned
        self.tells_owners = inner.tells_owners
        self.lists_by_stat = inner.lists_by_stat
        self.may_hide = inner.may_hide
        self.lists_in_one_piece = inner.lists_in_one_piece

    async def check(self) -> None:
        """See `Origin.check`; `inner` does it."""
        await self._inner.check()

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`; `inner` does it."""
        return await self._inner.read(path, meta, offset, length)

    def begin_read(
        self,
        path: str,
        meta: ObjectMeta,
        on_read: Callable[[memoryview | None], None],
        reply: Reply | None = None,
    ) -> bool:
        """See `Origin.begin_read`; `inner` does it."""
        return self._inner.begin_read(path, meta, on_read, reply)

    @property
    def sends(self) -> bool:
        """See `Origin.sends`."""
        return self._inner.sends

    def send(
        self, parts: Sequence[memoryview], reply: Reply, on_sent: Callable[[bool], None]
    ) -> bool:
        """See `Origin.send`; `inner` does it."""
        return self._inner.send(parts, reply, on_sent)

    @property
    def reads_many(self) -> bool:
        """See `Origin.reads_many`."""
        return self._inner.reads_many

    async def read_many(
        self,
        wanted: Sequence[tuple[str, ObjectMeta]],
        at_a_time: int,
        stopped: Callable[[], bool],
        turn: Turn = READER_TURN,
    ) -> list[memoryview | None]:
        """See `Origin.read_many`; `inner` does it."""
        found = await self._inner.read_many(wanted, at_a_time, stopped, turn)
        self.quickest_s = self._inner.quickest_s
        return found

    async def aclose(self) -> None:
        """Close `inner`."""
        await self._inner.aclose()
