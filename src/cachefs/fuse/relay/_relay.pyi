"""The compiled part: see relay.h and table.h for how it works.

Numbers of files are chosen by the daemon, below 2**20, and never used twice while it lives.
Offsets are in bytes and multiples of 512. Nothing here waits, but for a mutex that is held for
microseconds.
"""

from typing_extensions import Buffer

FORMAT: int
"""Of the shared table (docs/formats/relay_table.md)."""

def create_table(entries: int, /) -> int:
    """A memfd with an empty table for so many blocks: a power of two, 8 to 2**28. Raises
    `OSError`."""

def connect(requests_fd: int, device_fd: int, takes_notices: bool, /) -> None:
    """The next session of pyfuse3 reads requests from the socket, and writes its replies to
    /dev/fuse, whatever mountpoint it is given. Names to be dropped go to the socket if it takes
    them."""

def is_connected() -> bool:
    """Whether it did."""

def reads_ready_fd() -> int:
    """An eventfd, readable when READs that were kept back have their turn; asked for before a
    session begins, else none is kept back. Raises `OSError`."""

def bound_reads(user: int, most: int, is_slow: bool, /) -> None:
    """Have at most `most` READs of the user with this number in hand (0: as usual). Of a slow one's
    little is kept back, and the rest of what nobody waits for fails."""

class Relay:
    """In the supervisor: the threads that answer what they can, and forward the rest."""

    ended_fd: int
    """An eventfd, readable once the mount has ended."""

    def __init__(self, device_fd: int, table_fd: int, threads: int) -> None:
        """`device_fd` is made non-blocking, and must stay open. At most `threads` - 1 reads wait
        for disks at a time. Raises `OSError`."""

    def start(self) -> None:
        """Begin to read requests. Raises `OSError`."""

    def attach(self, requests_fd: int, /) -> None:
        """Forward to this SEQPACKET socket from now on (to a duplicate of it). If the kernel has
        sent INIT before, this daemon gets it first. Raises `OSError`."""

    def detach(self) -> None:
        """The daemon is gone."""

    def resend(self) -> bool:
        """Have the kernel send again what was forwarded and not answered. False if it can't (Linux
        before 6.9): then those requests have been answered with EIO."""

    def set_file(self, file: int, fd: int, waits: bool, /) -> None:
        """The slab file with this number; `fd` is taken over. `waits`: reads may wait for a disk.
        Raises `OSError`."""

    def close_file(self, file: int, /) -> None:
        """The daemon has called it dead, and may have deleted it."""

    def drop_files(self) -> None:
        """All of them: a new daemon begins."""

    def stop(self) -> None:
        """Answer nothing more. May be called twice."""

    def pretend_no_resend(self) -> None:
        """For tests: be as on a kernel without FUSE_NOTIFY_RESEND."""

class Table:
    """In the daemon: its only writer. All methods are atomic on the loop."""

    def __init__(self, fd: int) -> None:
        """Begins a new epoch: nothing that was published before is served any more. Raises
        `ValueError` for a table of another format."""

    def publish(
        self,
        ino: int,
        block: int,
        file: int,
        offset: int,
        length: int,
        is_last: bool,
        checksum: int,
        /,
    ) -> None:
        """The block lies there, and has that checksum. Raises `ValueError` for what can't be."""

    def invalidate(self, file: int, offset: int, /) -> None:
        """The slot is free: to be called before it is given to another block."""

    def revive(self, file: int, /) -> None:
        """Blocks of this file may be served."""

    def kill(self, file: int, /) -> None:
        """No block of this file is served any more: before it is changed, deleted or closed."""

    def find(self, ino: int, block: int, /) -> tuple[int, int, int, bool] | None:
        """What the relay would find: file, offset, length, is last."""

    def drain(self, most: int, /) -> list[tuple[int, int, int, int]]:
        """Inode, block, file and offset of blocks that were hit, each at least once since it was
        drained last. (Of one that has gone since, those of whatever took its place.)"""

    def take_file_hits(self, file: int, /) -> tuple[int, int]:
        """Hits in the file and their bytes, since this was asked last."""

    def pause(self, paused: bool, /) -> None:
        """While paused all READs come to the daemon."""

    def verify_all(self, verify: bool, /) -> None:
        """Whether the relay compares blocks of files in memory, too, on every read."""

    def note_sums(self, checksum: int, block: Buffer, /) -> None:
        """Keep the checksums of the parts of a block, which is right. Any thread may call this and
        the next two."""

    def has_sums(self, checksum: int, /) -> bool:
        """Whether those of the block with this checksum are kept."""

    def sums_agree(self, checksum: int, offset: int, data: Buffer, /) -> bool:
        """Whether bytes of that block are right. They begin with a part, and end with one or with
        the block. False also if nothing is known."""

    def user(self, uid: int, /) -> int:
        """The number of a user, the same as in handles; 0 when there are none left."""

    def limit_user(self, user: int, limited: bool, /) -> None:
        """All READs of a limited user come to the daemon."""

    def users(self) -> list[tuple[int, int, int]]:
        """Number, uid and bytes that the relay has given to each user; number 0 first, which
        stands for all who have none (its uid makes no sense)."""

    def counters(self) -> dict[str, int]:
        """Since the mount began: hits, hit_bytes, forwarded, missed, waited, late, changed,
        unnoted, hit_ns."""

    def hit_times(self) -> list[int]:
        """How many hits took how long, as in `metrics.Histogram.counts`."""
