"""A mount of the real kernel behind a relay, with a daemon of a few lines: files in the root
directory, and slab files that the test publishes as it likes."""

import contextlib
import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import NamedTuple, Self

from cachefs.fuse.kernel_mount import KernelMount, kernel_mount
from cachefs.fuse.relay import _relay
from cachefs.supervisor.channel import pair

BLOCK_BYTES = 1 << 20
ROOT = 1
_LOOKUP, _GETATTR, _READ, _STATFS, _INIT = 1, 3, 15, 17, 26
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_READ_IN = struct.Struct("<QQI")
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
_ENOENT, _ENOSYS = 2, 38
_FLAGS = 1 << 0 | 1 << 18 | 1 << 22 | 1 << 30
"""FUSE_ASYNC_READ, FUSE_PARALLEL_DIROPS, FUSE_MAX_PAGES, FUSE_INIT_EXT."""
_PASSTHROUGH_HIGH = 1 << (37 - 32)
_TTL_S = 3600


class File(NamedTuple):
    """A file of the mount. `path` has its content, for READs that come to the daemon."""

    ino: int
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size


class RawMount:
    """The relay of a supervisor, its table, and the present daemon, in one process."""

    def __init__(
        self,
        mountpoint: Path,
        *,
        passthrough: bool = True,
        negotiates: bool = True,
        writable: bool = False,
    ) -> None:
        """`negotiates`: the daemon asks for FUSE_PASSTHROUGH in its answer to INIT."""
        mountpoint.mkdir(exist_ok=True)
        self.mountpoint = mountpoint
        self.files: dict[str, File] = {}
        self.reads = 0
        """READs that came to the daemon."""
        self._negotiates = negotiates
        self._next_file = 0
        self._mount: KernelMount = kernel_mount(mountpoint, "raw", False, writable)
        self.fuse_fd = self._mount.fd
        self._table_fd = _relay.create_table(1 << 16)
        self.relay = _relay.Relay(self.fuse_fd, self._table_fd, 4, writable, passthrough)
        self.table = _relay.Table(self._table_fd)
        self._daemon: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.replace_daemon()
        self.relay.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._mount.detach()
        self.relay.stop()
        self._end_daemon()
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, self.fuse_fd, inheritable=False)
        os.close(nothing)
        os.close(self._table_fd)

    def replace_daemon(self) -> None:
        """Begin with a daemon, or with the next one, as after a crash: with a new epoch of the
        table, no files in the relay, and unanswered requests sent again."""
        is_first = self._daemon is None
        self._end_daemon()
        if not is_first:
            self.relay.drop_files()
            self.table = _relay.Table(self._table_fd)
            self._next_file = 0
        ours, self._daemon = pair()
        with ours:
            self.relay.attach(ours.fileno())
        self._thread = threading.Thread(target=self._serve, args=(self._daemon,), daemon=True)
        self._thread.start()
        if not is_first:
            self.relay.resend()

    def _end_daemon(self) -> None:
        self.relay.detach()
        if self._daemon is not None and self._thread is not None:
            self._thread.join()
            self._daemon.close()

    # -- what the tests set ----------------------------------------------------------------------

    def add(self, path: Path) -> File:
        """Show a file in the mount, with the content and the name of `path`."""
        file = self.files[path.name] = File(100 + len(self.files), path)
        return file

    def publish(self, file: File, *, whole: bool, content: Path | None = None) -> int:
        """Publish all blocks of a file as they lie in one slab file (`content`: another one than
        the file itself). Return the number of the slab file."""
        number, size = self._next_file, file.size
        self._next_file += 1
        self.table.revive(number)
        last = max(-(-size // BLOCK_BYTES), 1) - 1
        for block in range(last + 1):
            start = block * BLOCK_BYTES
            length = min(BLOCK_BYTES, size - start)
            self.table.publish(file.ino, block, number, start, length, block == last, 0)
        fd = os.open(content or file.path, os.O_RDONLY | os.O_CLOEXEC)
        self.relay.set_file(number, fd, False)
        self.table.mark_whole(number, whole)
        return number

    def counted(self, name: str) -> int:
        return self.table.counters()[name]

    # -- the daemon ------------------------------------------------------------------------------

    def _serve(self, requests: socket.socket) -> None:
        while True:
            try:
                request = requests.recv(1 << 17)
            except OSError:
                return
            if not request:
                return
            _, opcode, unique, ino, *_ = _IN.unpack_from(request)
            self._answer(unique, *self._handle(opcode, ino, request[_IN.size :]))

    def _answer(self, unique: int, error: int, data: bytes) -> None:
        if unique == 0x7FFFFFFFFFFFFF00:
            return  # to a replayed INIT
        with contextlib.suppress(OSError):  # it was sent again, or the mount has ended
            os.write(self.fuse_fd, _OUT.pack(_OUT.size + len(data), -error, unique) + data)

    def _handle(self, opcode: int, ino: int, body: bytes) -> tuple[int, bytes]:
        if opcode == _INIT:
            high = _PASSTHROUGH_HIGH if self._negotiates else 0
            depth = 1 if self._negotiates else 0
            readahead = 1 << 20
            return 0, _INIT_OUT.pack(
                7, 38, readahead, _FLAGS, 256, 192, 1 << 20, 1, 256, 0, high, depth
            )
        if opcode == _LOOKUP:
            file = self.files.get(body.rstrip(b"\0").decode())
            if file is None:
                return _ENOENT, b""
            entry = struct.pack("<QQQQII", file.ino, 1, _TTL_S, _TTL_S, 0, 0)
            return 0, entry + self._attributes(file.ino)
        if opcode == _GETATTR:
            return 0, struct.pack("<QII", _TTL_S, 0, 0) + self._attributes(ino)
        if opcode == _READ:
            self.reads += 1
            _, offset, size = _READ_IN.unpack_from(body)
            with self._of(ino).path.open("rb") as content:
                content.seek(offset)
                return 0, content.read(size)
        if opcode == _STATFS:
            return 0, bytes(80)
        return _ENOSYS, b""

    def _of(self, ino: int) -> File:
        return next(file for file in self.files.values() if file.ino == ino)

    def _attributes(self, ino: int) -> bytes:
        if ino == ROOT:
            return _ATTR.pack(
                ROOT, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0
            )
        size, mode = self._of(ino).size, stat.S_IFREG | 0o444
        return _ATTR.pack(ino, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
