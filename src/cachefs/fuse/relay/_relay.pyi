"""The compiled part. relay.h, table.h and reads.h describe how it works.

The daemon chooses the numbers of slab files, below 2**20, and uses none twice in its life. Offsets
are in bytes and multiples of 512. No function waits, except for a mutex that is held for
microseconds.
"""

from typing_extensions import Buffer

FORMAT: int
"""Version of the shared table's format (docs/formats/relay_table.md)."""

def create_table(entries: int, /) -> int:
    """Return a new memfd with an empty table for `entries` blocks (a power of two, 8 to 2**28).

    The caller owns the descriptor. Raises `OSError`.
    """

def accept_writes() -> None:
    """Negotiate a writable mount in the answer to INIT of all later sessions: the kernel truncates
    by SETATTR, keeps its pages when the mtime changes, and writes at most 128 KiB at a time. The
    pid of a request that the kernel sends again and that must not be done twice has bit 30 set."""

def pass_through() -> None:
    """Negotiate passthrough in the answer to INIT of all later sessions, if the kernel offers it.
    Not for a writable mount."""

def connect(requests_fd: int, device_fd: int, takes_notices: bool, /) -> None:
    """Connect the next session of pyfuse3 to the relay, whatever its mountpoint.

    The session reads requests from the socket `requests_fd`, and writes replies to `device_fd`
    (/dev/fuse). With `takes_notices`, invalidations of names go to the socket. The session owns and
    closes `requests_fd`; `device_fd` stays the caller's.
    """

def next_read() -> tuple[int, int, int, int, bytes] | bool | None:
    """Receive the next request if it is a READ, and return its number (`unique`), handle, offset,
    size, and bytes. None if there is no request yet; False if libfuse must read the next one.

    libfuse takes the READ, unless `take_read` is called first."""

def take_read() -> None:
    """Take over what `next_read` has returned: the caller answers it, and then calls
    `read_answered`, or `return_read`."""

def read_answered(unique: int, /) -> None:
    """Say that a READ of `take_read` was answered."""

def return_read(request: bytes, /) -> None:
    """Give a READ of `take_read` to libfuse after all."""

def request_process() -> int:
    """Return the process that sent the request which the session has read last, by the id of its
    first thread. 0 if it is not known: the kernel wrote mapped pages on its own, or the process is
    in a pid namespace that is not visible here. Call it in a handler before the first await."""

def request_caller() -> tuple[int, int, int]:
    """Return user, group and thread that sent the request which was read last; the thread is 0 if
    it is not known. A handler calls this before it first waits."""

def is_connected() -> bool:
    """Return whether a pyfuse3 session was connected since the last `connect` call."""

def reads_ready_fd() -> int:
    """Return an eventfd that is readable while a deferred READ is due.

    The first call must come before the session begins. Without it, no READ is deferred. The
    module owns the descriptor. Raises `OSError`.
    """

def bound_reads(user: int, most: int, is_slow: bool, /) -> None:
    """Let the daemon handle at most `most` READs of this user number at once (0: the default).

    Of a user with `is_slow`, only a few READs are deferred. Above that, the oldest READ without a
    waiting thread fails.
    """

class Relay:
    """Threads in the supervisor that answer READs of cached blocks and forward other requests."""

    ended_fd: int
    """An eventfd, readable once the mount has ended, and after `stop_reading`."""
    can_resend: bool
    """Whether the kernel can send unanswered requests again (Linux 6.9). False before INIT."""

    def __init__(
        self,
        device_fd: int,
        table_fd: int,
        threads: int,
        writable: bool = False,
        passthrough: bool = False,
    ) -> None:
        """Make a relay without starting it. Raises `OSError`.

        `device_fd` becomes non-blocking, stays the caller's, and must stay open. `table_fd` may be
        closed afterwards. At most `threads` - 1 reads wait for disks at a time. With `passthrough`,
        the relay answers OPEN if the kernel can read whole files directly, and the mount is not
        writable.
        """

    def start(self) -> None:
        """Start the threads, which then read requests. Raises `OSError`."""

    def attach(self, requests_fd: int, /) -> None:
        """Forward requests to a duplicate of this SEQPACKET socket from now on.

        If the kernel has already sent INIT, this daemon receives it first. Raises `OSError`.
        """

    def detach(self) -> None:
        """Stop forwarding: the daemon is gone or leaves."""

    def resend(self) -> bool:
        """Make the kernel send all forwarded, unanswered requests again.

        Return False if it can't (Linux before 6.9). Those requests then fail with EIO.
        """

    def set_file(self, file: int, fd: int, on_disk: bool, /) -> None:
        """Use `fd` for the slab file with this number, and take ownership of it.

        `on_disk` says that reads may wait for a disk, and that their bytes are compared. Raises
        `OSError`."""

    def close_file(self, file: int, /) -> None:
        """Close a slab file: the table has marked it dead, or the relay has too many open files."""

    def drop_files(self) -> None:
        """Close all slab files, because a new daemon begins."""

    def stop(self) -> None:
        """Stop answering, and end the threads. A second call does nothing."""

    def stop_reading(self) -> None:
        """End the threads that read requests. Later requests wait in the kernel.

        Returns when no thread reads any more. The daemon still receives what was read, and answers
        it. A second call does nothing.
        """

    def unanswered(self) -> int:
        """Return how many of the requests that were forwarded have no answer yet."""

    def leave(self) -> None:
        """End the threads as `stop` does, but leave unanswered requests to the next relay.

        They stay in the kernel, which sends them again when the next relay asks for it. If this
        kernel can't do that (`can_resend`), they fail with EIO.
        """

    def kept_init(self) -> bytes | None:
        """Return the kernel's INIT, which another relay needs for `adopt`. None before the kernel
        has sent it."""

    def adopt(self, init: bytes, /) -> None:
        """Take over a mount that another relay has left. Must come before `start`.

        `init` is the result of its `kept_init`. Call `resend` after `start`. Raises `OSError`
        (EINVAL) if it is no such INIT.
        """

    def pretend_no_resend(self) -> None:
        """For tests: behave as on a kernel without FUSE_NOTIFY_RESEND."""

class Table:
    """The shared table, in the daemon, which is its only writer.

    All methods are atomic on the loop. Only `note_sums`, `has_sums` and `sums_agree` may be called
    from any thread.
    """

    def __init__(self, fd: int) -> None:
        """Begin a new epoch: the relay serves nothing that was published before.

        Raises `ValueError` for a table of a format that is neither this one nor the one before. The
        caller may close `fd` afterwards.
        """

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
        """Publish where a block lies, its length in bytes, and its checksum.

        Raises `ValueError` for values out of range.
        """

    def withdraw(self, file: int, offset: int, /) -> None:
        """Mark a slot as free. Must be called before another block gets the slot."""

    def remove(self, ino: int, first: int, end: int, /) -> None:
        """Remove the entries of a file's blocks from `first` to before `end`: the file changes."""

    def mark_unsent(self, ino: int, is_unsent: bool, /) -> None:
        """Count this file as one with unsent changes, or no longer. The daemon receives FLUSH of
        marked files; the relay answers all others. Call this once for each change of the state."""

    def set_unsent(self, inos: Buffer, /) -> None:
        """Count exactly these files (an array of u64) as ones with unsent changes."""

    def revive(self, file: int, /) -> None:
        """Allow the relay to serve blocks of this file."""

    def withdraw_file(self, file: int, /) -> None:
        """Stop serving blocks of this file. Must come before it is changed, deleted or closed."""

    def mark_whole(self, file: int, whole: bool, /) -> None:
        """Say whether the bytes of a file are exactly the content of the inode whose block 0 is
        published at its start: complete and verified.

        The kernel may then read the file directly, at any later time, too. So the bytes of such a
        file must never change again, even after `withdraw_file`: it may only be unlinked.
        """

    def pass_through(self, allowed: bool, /) -> None:
        """Set whether files may be passed through when they are opened. Open files stay as they
        are."""

    def find(self, ino: int, block: int, /) -> tuple[int, int, int, bool] | None:
        """Return what the relay would find: file, offset, length, is_last. None if nothing."""

    def drain(self, most: int, /) -> list[tuple[int, int, int, int]]:
        """Return inode, block, file and offset of at most `most` blocks that were hit.

        Each block had at least one hit since it was drained last. If another block has replaced
        its entry since, the values are those of the other block.
        """

    def take_file_hits(self, file: int, /) -> tuple[int, int]:
        """Return the number of hits in the file and their bytes since the last call."""

    def pause(self, paused: bool, /) -> None:
        """Send all READs to the daemon while `paused`."""

    def verify_all(self, verify: bool, /) -> None:
        """Set whether the relay compares checksums for files in memory, too, on every read."""

    def note_sums(self, checksum: int, block: Buffer, /) -> None:
        """Store the checksums of the parts of a verified block. Any thread."""

    def has_sums(self, checksum: int, /) -> bool:
        """Return whether part checksums of the block with this checksum are stored. Any thread."""

    def sums_agree(self, checksum: int, offset: int, data: Buffer, /) -> bool:
        """Return whether bytes of that block match the stored part checksums. Any thread.

        `offset` must be at the start of a part. The bytes must end with a part or with the block.
        False also if no checksums are stored.
        """

    def user(self, uid: int, /) -> int:
        """Return the number of a user, the same as in handles; 0 when none is left."""

    def limit_user(self, user: int, limited: bool, /) -> None:
        """Set whether all READs of this user number go to the daemon."""

    def add_user_bytes(self, user: int, read_bytes: int, /) -> None:
        """Count bytes that a daemon has served for this user number."""

    def users(self) -> list[tuple[int, int, int]]:
        """Return number, uid and bytes served for each user: by the relay, and those added.

        Number 0 comes first. It stands for all users without a number, and its uid is meaningless.
        """

    def counters(self) -> dict[str, int]:
        """Return the counters since the mount began: hits, hit_bytes, forwarded, missed, waited,
        late, changed, unnoted, hit_ns, opens, opens_through; and two states: opens_state (0: no
        file was opened yet, 1: OPEN is answered, 2: it is not) and through_error, an errno (ENOSYS:
        the relay is of an earlier version).
        `struct rt_header` in table.h describes each.
        """

    def hit_times(self) -> list[int]:
        """Return the histogram of hit durations, in the form of `metrics.Histogram.counts`."""
