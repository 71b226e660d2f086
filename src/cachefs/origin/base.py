"""The protocol that every origin speaks.

Paths are relative to the mounted prefix: `""` is the root, `"a/b.jpg"` an object; no leading or
trailing slash. They are `str`; bytes that are not UTF-8 are carried as surrogate escapes.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cachefs.origin.body import Body
from cachefs.types import Buffer, Entry, Found, ObjectMeta

_SKIPPING_DIRECTORIES = 10_000
"""Most that are remembered to have keys that can't be shown."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OriginCounters:
    """Requests that were really sent to the origin, counted by the origin itself."""

    gets: int = 0
    heads: int = 0
    lists: int = 0
    get_bytes: int = 0
    errors: int = 0
    skipped_keys: int = 0
    """Keys of listings that can't be shown as names (see docs/SEMANTICS.md)."""
    unshown: dict[str, int] = field(default_factory=dict)
    """The same by directory, in its last listing."""
    _told_of: set[str] = field(default_factory=set)

    def begin_listing(self, directory: str) -> None:
        """What was skipped in an earlier one no longer counts."""
        self.unshown.pop(directory, None)

    def skip(self, directory: str, example: str, count: int = 1) -> None:
        """A listing has `count` keys that can't be shown. One of each directory is logged once."""
        self.skipped_keys += count
        if len(self.unshown) < _SKIPPING_DIRECTORIES or directory in self.unshown:
            self.unshown[directory] = self.unshown.get(directory, 0) + count
        if directory not in self._told_of and len(self._told_of) < _SKIPPING_DIRECTORIES:
            self._told_of.add(directory)
            _logger.info(
                "the directory %r has keys that can't be shown as files, such as %r; give them "
                "other names at the origin, if you want to see them",
                *("/" + directory, example[:1024]),
            )


class Origin(ABC):
    """A read-only tree of immutable object versions.

    All methods are coroutines on the trio loop and never block it. All raise `OriginError`
    and its children only: `NotFoundError`, `AccessDeniedError`, `OriginUnavailableError`, ...
    """

    url: str
    """The source as the user knows it, without credentials."""

    identity: str
    """Canonical name of the source (store, bucket, prefix): the same on every node, part of
    every object id, free of credentials."""

    counters: OriginCounters

    held_back_at = float("-inf")
    """When a read was last kept waiting on purpose (a bandwidth limit), on trio's clock."""

    progressed_at = float("-inf")
    """When bytes last came of a body that takes its time, on trio's clock."""

    best_read_bytes = float("inf")
    """How much to ask for in one `read`: less over a slow line."""

    tells_owners = False
    """Files and directories have an owner, a group and a mode; so `stat("")` is a request."""

    lists_by_stat = False
    """A listing may cost a request for each name, so it never spares look-ups."""

    lists_in_one_piece = False
    """The first page of a directory takes as long as all of it."""

    @abstractmethod
    async def check(self) -> None:
        """Prove once, at mount time, that the source exists and may be read.

        Raises `NotFoundError` for a missing bucket or directory, `AccessDeniedError` for wrong
        credentials, `OriginUnavailableError` within 5 s for an endpoint that doesn't answer.
        """

    @abstractmethod
    async def stat(self, path: str) -> Found:
        """Metadata of the object at `path`; of a directory its owner and mode, or None where
        there are none.

        Costs one request for an object, and none for the root without an owner. Where a key is
        both an object and a prefix, an object of one byte or more wins, an empty one yields to
        the directory. Raises `NotFoundError`.
        """

    async def stat_and_read(self, path: str) -> tuple[Found, Buffer | None]:
        """`stat`, and all bytes of the object if it is small and they cost no further request."""
        return await self.stat(path), None

    async def stat_unlisted(self, path: str) -> Found:
        """`stat` of what is known to be a file, or a directory, and never a LIST: so an empty
        object wins over a directory, and a directory without an owner may be taken for absent.
        """
        return await self.stat(path)

    @abstractmethod
    def list_dir(
        self, path: str, below: dict[str, list[Entry]] | None = None
    ) -> AsyncIterator[list[Entry]]:
        """The entries directly below `path`, page by page, each name once.

        Whoever gives a dictionary as `below` finds in it, when the pages have come, all entries of
        such directories further below as were seen on the way, by path. An origin that sees such
        things at no cost may ask in that way first.

        Keys that are not names are left out and counted in `counters.skipped_keys`; the rule
        for a key that is both object and prefix is that of `stat`. Raises `NotFoundError` when
        there is no such directory, `NotADirError` when it is an object with nothing below it.

        After an `OriginUnavailableError` or a cancellation the iterator can be asked again, and
        asks for the same page again; only `resilience` makes use of that, nobody else retries.
        """

    @abstractmethod
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """Exactly `length` bytes at `offset` of exactly the version `meta`; `length` >= 1 and
        the range lies inside the object.

        Raises `ObjectChangedError` when the object now has another version, `NotFoundError`
        when it is gone, `BadDataError` when the answer has the wrong length.
        """

    async def read_body(
        self, path: str, meta: ObjectMeta, offset: int, length: int, body: Body | None
    ) -> Buffer:
        """`read`, and an origin that can does it piece by piece: what has come stands in `body`
        (of `length` bytes), also when the read fails or is given up; and nobody is asked for the
        rest any more once that is taken."""
        return await self.read(path, meta, offset, length)

    @property
    def reads_many(self) -> bool:
        """`read_many` is worth a try just now."""
        return False

    async def read_many(
        self,
        wanted: Sequence[tuple[str, ObjectMeta]],
        at_a_time: int,
        stopped: Callable[[], bool],
    ) -> list[memoryview | None]:
        """Small objects as a whole, as `read` gives them, by a request for each, so many
        `at_a_time`, but together at less cost. Once `stopped()`, which any thread may call, no
        more are asked for. None for what can't be had so: `read` has it, or says why not."""
        return [None] * len(wanted)

    @abstractmethod
    async def aclose(self) -> None:
        """Free connections. Nothing else is called afterwards."""
