"""A memcached of our own: `with Memcached(directory) as member: ... member.port ...`.

It has the flags of docs/SHARED_TIER.md, with sizes for tests, and listens on the loopback interface
only. Needs the Debian package memcached. No pytest here.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.servers.ports import free_ports
from tests.servers.room import need_room
from tests.servers.s3_server import stop_process
from tests.servers.suspend import suspend

MEMORY_MIB = 64
EXTSTORE = "256M"
_START_TIMEOUT_S = 60
_NEEDED_BYTES = 256 << 20
"""Free space for the file of extstore."""
_STEP_S = 0.02


def memcached_binary() -> str | None:
    """The `memcached` of this machine, if any. Root's PATH may lack its directory."""
    return shutil.which("memcached", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")


def flags(directory: Path, extstore: str = EXTSTORE, memory_mib: int = MEMORY_MIB) -> list[str]:
    """What docs/SHARED_TIER.md says, but for sizes. `extstore` is the size of the file that has the
    blocks, as memcached reads it."""
    options = ["ext_item_age=0", "ext_wbuf_size=8", "ext_threads=4", "slab_automove_window=3"]
    words = ",".join([f"ext_path={directory}/extstore:{extstore}", *options])
    return ["-m", str(memory_mib), "-I", "2m", "-c", "4096", "-o", words]


class Memcached:
    """Started by `with`, gone after it. `directory` takes extstore's file; it is not removed.

    `port` stays the same when it is started again, and is nobody else's meanwhile. `arguments`
    replace `flags(directory)`.
    """

    def __init__(self, directory: Path, arguments: Sequence[str] | None = None) -> None:
        (self.port,) = free_ports(1)
        self.arguments = list(flags(directory) if arguments is None else arguments)
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id while running."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        """Start, and return when it answers. Raises `RuntimeError`."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, empty. Raises `RuntimeError` if it ends, `TimeoutError` if it is silent."""
        binary = memcached_binary()
        if binary is None:
            raise RuntimeError("memcached is missing: apt-get install memcached")
        need_room(self._directory, _NEEDED_BYTES, "memcached")
        user = ["-u", "root"] if os.geteuid() == 0 else []
        place = ["-l", "127.0.0.1", "-p", str(self.port), "-U", "0"]
        log_path = self._directory / "memcached.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [binary, *user, *place, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the one who started us
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._has_started():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                said = log_path.read_text(errors="replace")[-500:]
                raise RuntimeError(f"memcached does not start: {said}")
            time.sleep(_STEP_S)

    def _has_started(self) -> bool:
        """Whether anything listens at the port. One that wants TLS or a password does, too."""
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def stop(self) -> None:
        """End it at once; what it held is gone. May be called twice."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            stop_process(self._process)
            self._process = None

    def kill(self) -> None:
        """Let it die by SIGKILL, as `stop` does: there is nothing that it could tidy up."""
        self.stop()

    def pause(self) -> None:
        """Stop its process (SIGSTOP): connections stay, and nothing is answered."""
        assert self._process is not None
        suspend(self._process.pid)

    def go_on(self) -> None:
        """Let a paused one run again (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, command: bytes, end: bytes = b"\r\n") -> bytes:
        """Send a command, and return what is answered until `end`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as sock:
            sock.sendall(command + b"\r\n")
            answer = b""
            while not answer.endswith(end):
                piece = sock.recv(1 << 16)
                if not piece:
                    break
                answer += piece
            return answer

    def stats(self) -> dict[str, str]:
        """What `stats` says, by name."""
        lines = self.ask(b"stats", b"END\r\n").decode().splitlines()
        words = [line.split(" ", 2) for line in lines if line.startswith("STAT ")]
        return {name: value for _, name, value in words}
