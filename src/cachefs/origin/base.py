"""The interface that every origin implements.

Paths are relative to the mounted prefix: `""` is the root, `"a/b.jpg"` is an object. They have no
leading or trailing slash. They are `str`; bytes that are not UTF-8 become surrogate escapes.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cachefs.origin.body import Body
from cachefs.origin.names import join
from cachefs.origin.writable import WritableOrigin, WriteCounters
from cachefs.types import READER_TURN, Buffer, Entry, Found, ObjectMeta, Reply, Turn

_MOST_DIRECTORIES = 10_000
"""Limit on the number of directories for which unshown keys are counted."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OriginCounters:
    """Counters of requests that were really sent. The origin itself updates them."""

    gets: int = 0
    heads: int = 0
    lists: int = 0
    get_bytes: int = 0
    errors: int = 0
    writes: WriteCounters = field(default_factory=WriteCounters)
    unshown_keys: int = 0
    """Listed keys that can't be shown as file names (see docs/SEMANTICS.md)."""
    unshown_in_dir: dict[str, int] = field(default_factory=dict)
    """By directory: the number of such keys in its last listing."""
    links_out_in_dir: dict[str, int] = field(default_factory=dict)
    """By directory: how many of them are links that lead out of the source."""
    _told_of: set[str] = field(default_factory=set)

    def begin_listing(self, directory: str) -> None:
        """Forget the unshown keys of an earlier listing of `directory`."""
        self.unshown_in_dir.pop(directory, None)
        self.links_out_in_dir.pop(directory, None)

    def note_unshown(
        self, directory: str, example: str, count: int = 1, *, leads_out: bool = False
    ) -> None:
        """Count `count` keys of a listing that can't be shown. With `leads_out`, they are links
        that lead out of the source. The first call for a directory logs `example`."""
        self.unshown_keys += count
        earlier = self.unshown_in_dir.get(directory)
        if earlier is not None or len(self.unshown_in_dir) < _MOST_DIRECTORIES:
            self.unshown_in_dir[directory] = (earlier or 0) + count
            if leads_out:
                links = self.links_out_in_dir.get(directory, 0)
                self.links_out_in_dir[directory] = links + count
                return  # the origin says where they lead
        if directory not in self._told_of and len(self._told_of) < _MOST_DIRECTORIES:
            self._told_of.add(directory)
            _logger.info(
                "the directory %r has keys that can't be shown as files, such as %r; give them "
                "other names at the origin, if you want to see them",
                "/" + directory,
                example[:1024],
            )


class Learned:
    """What an origin has found out about its store, as words. The mount keeps them for its later
    daemons, so that they understand versions as this one does."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.on_change: Callable[[], None] | None = None

    def note(self, word: str) -> None:
        """Add a word."""
        self.words.add(word)
        if self.on_change is not None:
            self.on_change()


class Origin(ABC):
    """A tree of immutable object versions. What writes to it is its `writer`.

    All methods run on the trio loop and never block it. They raise only `OriginError` and its
    subclasses: `NotFoundError`, `AccessDeniedError`, `OriginUnavailableError`, ...
    """

    url: str
    """The source URL as the user wrote it, without credentials."""

    identity: str
    """The canonical name of the source (store, bucket, prefix). It is the same on every node, is
    part of every object id, and contains no credentials."""

    counters: OriginCounters

    learned: Learned | None = None
    """None if the origin learns nothing that later daemons must know."""

    held_back_at = float("-inf")
    """When a read last waited for the bandwidth limit, on trio's clock."""

    progressed_at = float("-inf")
    """When bytes of a slow body last arrived, on trio's clock."""

    best_read_bytes = float("inf")
    """The best size of one `read`; smaller over a slow line and with a bandwidth limit."""

    quickest_s = 0.0
    """The shortest time in which a request has been answered; 0 while unknown."""

    tells_owners = False
    """Files and directories have an owner, a group and a mode, so `stat("")` sends a request."""

    lists_by_stat = False
    """A listing may cost one request per name, so listing never saves look-ups."""

    may_hide: re.Pattern[bytes] | None = None
    """Matches names that may exist though no listing of their directory shows them. Only a look-up
    can find such a name absent."""

    lists_in_one_piece = False
    """The first page of a directory takes as long as the whole listing."""

    @property
    def writer(self) -> WritableOrigin | None:
        """Writes to this origin. None if it can only be read."""
        return None

    @abstractmethod
    async def check(self) -> None:
        """Verify, once at mount time, that the source exists and is readable.

        Raises `NotFoundError` for a missing bucket or directory, `AccessDeniedError` for wrong
        credentials, `OriginUnavailableError` within 5 s for an endpoint that doesn't answer.
        """

    @abstractmethod
    async def stat(self, path: str) -> Found:
        """Return the metadata of the object at `path`. For a directory, return its owner and mode,
        or None if the origin has none.

        Costs one request for an object, and none for the root if `tells_owners` is false. If a key
        is both an object and a prefix, an object of one byte or more wins; an empty object loses
        against the directory. Raises `NotFoundError`.
        """

    async def stat_and_read(self, path: str) -> tuple[Found, Buffer | None]:
        """Do `stat`, and also return all bytes of a small object if that costs no extra request."""
        return await self.stat(path), None

    async def stat_unlisted(self, path: str) -> Found:
        """Do `stat` without a LIST, for a path that is known to exist. So an empty object wins
        against a directory, and a directory without an owner may be reported as absent.
        """
        return await self.stat(path)

    @abstractmethod
    def list_dir(
        self, path: str, below: dict[str, list[Entry]] | None = None
    ) -> AsyncIterator[list[Entry]]:
        """Return the entries directly below `path` page by page, each name once.

        If `below` is a dictionary, it holds after the last page the complete entries of those
        deeper directories that the origin saw as well, by path. An origin that can see them
        without extra cost may choose its first request for this.

        Keys that are not file names are left out and counted in `counters.unshown_keys`. For a key
        that is both an object and a prefix, the rule of `stat` applies. Raises `NotFoundError` if
        the directory does not exist, `NotADirError` if it is an object with nothing below it.

        After an `OriginUnavailableError` or a cancellation, the next call on the iterator requests
        the same page again. Only `resilience` uses this. Loads and `refresh` repeat whole calls.
        """

    @abstractmethod
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """Return exactly `length` bytes at `offset` of exactly the version `meta`. `length` is at
        least 1 and the range lies inside the object.

        Raises `ObjectChangedError` if the object has another version now, `NotFoundError` if it
        no longer exists, `BadDataError` if the answer has the wrong length.
        """

    async def read_in_turn(
        self, turn: Turn, path: str, meta: ObjectMeta, offset: int, length: int
    ) -> Buffer:
        """Do `read`. An origin with queues serves a request in them by the priority of `turn`."""
        return await self.read(path, meta, offset, length)

    async def read_body(
        self, path: str, meta: ObjectMeta, offset: int, length: int, body: Body | None
    ) -> Buffer:
        """Do `read`. An origin that receives a body in pieces also adds them to `body` (of `length`
        bytes), so that they remain if the read fails or is cancelled. Once the caller has taken
        `body`, the origin stops receiving the rest."""
        return await self.read(path, meta, offset, length)

    def begin_read(
        self,
        path: str,
        meta: ObjectMeta,
        on_read: Callable[[memoryview | None], None],
        reply: Reply | None = None,
    ) -> bool:
        """Begin to read a whole small object, at a lower cost than `read`: no task waits for it.
        Return whether it has begun. If so, `on_read` is called later, on the loop: with the bytes,
        or with None if this method could not read them. In both cases of failure the caller uses
        `read`, which also reports errors. A `reply` is sent just before `on_read` gets bytes, and
        not if it gets None."""
        return False

    @property
    def sends(self) -> bool:
        """Whether `send` can send."""
        return False

    def send(
        self, parts: Sequence[memoryview], reply: Reply, on_sent: Callable[[bool], None]
    ) -> bool:
        """Send one or two parts as a reply by a thread that reads from this origin, if it has any.
        Nobody may change them. Return whether it will; then `on_sent` is called later with whether
        the reply was sent."""
        return False

    @property
    def reads_many(self) -> bool:
        """Whether `read_many` can return objects at present."""
        return False

    async def read_many(
        self,
        wanted: Sequence[tuple[str, ObjectMeta]],
        at_a_time: int,
        stopped: Callable[[], bool],
        turn: Turn = READER_TURN,
    ) -> list[memoryview | None]:
        """Return whole small objects, as `read` does, at a lower cost. It sends one request for
        each object, at most `at_a_time` at a time. Once `stopped()` returns true, it sends no more
        requests; any thread may call `stopped`. The result has None for an object that this method
        could not read: the caller uses `read` for it, which also reports errors. `turn` is as in
        `read_in_turn`."""
        return [None] * len(wanted)

    def reorder(self) -> None:
        """Note that the priority of the turns of some requests has risen."""
        return

    def _subject(self, path: str) -> str:
        """Return the name of `path` in messages."""
        return join(self.url.rstrip("/"), path)

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections. No other method may be called afterwards."""
