"""The parts of a measurement: an S3 server, a mount, reader processes, cold caches."""

import contextlib
import json
import os
import selectors
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.certificates import Certificates, make_certificates
from tests.servers.ports import free_ports
from tests.servers.seaweedfs import SeaweedFS

ROOT = Path(__file__).resolve().parent.parent
BUCKET = "data"
_READER = Path(__file__).with_name("reader.py")
_WRITER = Path(__file__).with_name("writer.py")
_COMMAND_TIMEOUT_S = 120
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Server(SeaweedFS):
    """SeaweedFS with one bucket and a request counter of its own. It also speaks TLS, on another
    port."""

    _metrics_port = 0
    _https_port = 0
    certificates: Certificates | None = None

    @property
    def tls_endpoint(self) -> str:
        """The address for HTTPS. The CA is in `certificates`."""
        return f"https://127.0.0.1:{self._https_port}"

    @property
    def tls_options(self) -> list[str]:
        """The words with which `cachefs mount` trusts the CA."""
        assert self.certificates is not None
        return ["--ca-file", str(self.certificates.ca)]

    def _arguments(self, data: Path, ports: list[int], grpc: list[int]) -> list[str]:
        self._metrics_port, self._https_port = free_ports(2)
        if self.certificates is None:
            self.certificates = make_certificates(self._directory / "tls")
        return [
            *super()._arguments(data, ports, grpc),
            f"-metricsPort={self._metrics_port}",
            f"-s3.port.https={self._https_port}",
            f"-s3.cert.file={self.certificates.server}",
            f"-s3.key.file={self.certificates.key}",
        ]

    def store(self, endpoint: str | None = None) -> Any:
        """Return an obstore store for the bucket, through another endpoint if one is given."""
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            endpoint=endpoint or self.endpoint,
            region=self.region,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def object_gets(self, bucket: str = BUCKET) -> int:
        """Return how many GETs of objects the server has begun to answer, by its own count (no
        HEADs, no listings)."""
        wanted = "SeaweedFS_s3_time_to_first_byte_millisecond_count{"
        return self._sum(wanted, 'type="GET"', f'bucket="{bucket}"')

    def sent_bytes(self, bucket: str = BUCKET) -> int:
        """Return how many bytes the server has sent from the bucket, by its own count."""
        return self._sum("SeaweedFS_s3_bucket_traffic_sent_bytes_total{", f'bucket="{bucket}"')

    def received_bytes(self, bucket: str = BUCKET) -> int:
        """Return how many bytes the server has received for the bucket, by its own count."""
        return self._sum("SeaweedFS_s3_bucket_traffic_received_bytes_total{", f'bucket="{bucket}"')

    def _sum(self, metric: str, *labels: str) -> int:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10
        ) as answer:
            text: str = answer.read().decode()
        return sum(
            int(float(line.rpartition(" ")[2]))
            for line in text.splitlines()
            if line.startswith(metric) and all(label in line for label in labels)
        )


@contextlib.contextmanager
def server(directory: Path) -> Iterator[Server]:
    """Run a server with an empty bucket and its files in `directory`."""
    directory.mkdir(parents=True)
    with Server(directory) as running:
        running.make_bucket(BUCKET)
        yield running


def upload(
    store: Any,
    objects: Iterable[tuple[str, Path | bytes]],
    in_flight: int = 32,
    on_done: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """Put files (or bytes) under their keys. After each it calls `on_done` with the bytes, in any
    thread."""
    import obstore

    def put(item: tuple[str, Path | bytes]) -> None:
        key, source = item
        obstore.put(store, key, source)
        on_done(len(source) if isinstance(source, bytes) else source.stat().st_size)

    with ThreadPoolExecutor(in_flight) as pool:
        for _ in pool.map(put, objects):
            pass


def cachefs_command() -> list[str]:
    """Return the console script of this environment, as a user would run it."""
    script = Path(sys.executable).with_name("cachefs")
    if not script.exists():
        raise RuntimeError(f"{script} is missing: run scripts/bootstrap (make demo does)")
    return [str(script)]


class Mount:
    """A mount through the real command line. `with Mount(...) as mount` mounts and unmounts it."""

    def __init__(
        self,
        base: Path,
        source: str,
        environment: Mapping[str, str],
        endpoint: str | None,
        options: Sequence[str] = (),
    ) -> None:
        """All files of the mount lie below `base`: `mnt`, `cache` and `daemon.log`."""
        self.path = base / "mnt"
        self.cache_dir = base / "cache"
        self._base = base
        self._environment = {**os.environ, **environment}
        self.arguments = [
            "mount",
            source,
            str(self.path),
            *(["--endpoint", endpoint] if endpoint else []),
            "--cache-dir",
            str(self.cache_dir),
            "--log-file",
            str(base / "daemon.log"),
            *options,
        ]

    @property
    def command_line(self) -> str:
        """The command line, as a user would type it."""
        return shlex.join(["cachefs", *self.arguments])

    def __enter__(self) -> "Mount":
        self.path.mkdir(parents=True, exist_ok=True)
        self.mount()
        return self

    def mount(self) -> None:
        """Mount, or mount again after the end of all processes of the mount."""
        self._call(self.arguments)

    def __exit__(self, *failure: object) -> None:
        self.unmount()

    def unmount(self) -> None:
        """Unmount, and wait until the daemon has ended. Does nothing if it is not mounted."""
        if self.path.is_mount():
            self._call(["umount", str(self.path)])

    def remove(self) -> None:
        """Delete all files below `base`. Call it after the unmount."""
        shutil.rmtree(self._base)

    def status(self) -> dict[str, Any]:
        """Return the object of this mount in `cachefs status --json`."""
        for mount in json.loads(self._call(["status", "--json"])):
            if mount["mountpoint"] == str(self.path):
                status: dict[str, Any] = mount
                return status
        raise RuntimeError(f"`cachefs status --json` doesn't list {self.path}")

    def command(self, *arguments: str) -> str:
        """Run a cachefs command and return its output. Raises `RuntimeError` if it fails."""
        return self._call(arguments)

    def daemon_log(self) -> str:
        """Return the last 2,000 characters of the daemon's log."""
        with contextlib.suppress(OSError):
            return (self._base / "daemon.log").read_text(errors="replace")[-2000:]
        return ""

    def _call(self, arguments: Sequence[str]) -> str:
        result = subprocess.run(
            [*cachefs_command(), *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            said = (result.stderr or result.stdout).strip()
            raise RuntimeError(f"cachefs {arguments[0]} failed ({result.returncode}): {said}")
        return result.stdout


@dataclass(frozen=True, slots=True)
class Reading:
    """The sums over some readers."""

    files: int
    bytes: int
    seconds: float

    @property
    def files_s(self) -> float:
        return self.files / self.seconds

    @property
    def mb_s(self) -> float:
        return self.bytes / self.seconds / 1e6


def read_files(
    root: Path,
    names: Sequence[str],
    readers: int = 1,
    *,
    passes: int = 1,
    chunks: bool = False,
    by_python: bool = False,
    everyone_all: bool = False,
    list_file: Path,
    timeout_s: float = 300,
    on_progress: Callable[[int], None] | None = None,
    before_go: Callable[[], None] = lambda: None,
) -> Reading:
    """Read `names` below `root` with `readers` processes. Each reads a share of the names, or with
    `everyone_all` all of them.

    The clock starts after the processes have started and loaded `list_file`, which this function
    writes. It calls `before_go` just before the clock starts. See reader.py for the ways to read.
    """
    list_file.write_text("\n".join(names) + "\n", encoding="utf-8")
    how = "CHUNKS" if chunks else "PYTHON" if by_python else "WHOLE"
    shares = [(0, 1) if everyone_all else (number, readers) for number in range(readers)]
    commands = [[_READER, root, list_file, passes, *share, how] for share in shares]
    return _run_all(commands, timeout_s, on_progress, before_go)


def write_files(
    root: Path,
    files: Sequence[tuple[str, int]],
    writers: int = 1,
    *,
    how: str = "CLOSE",
    list_file: Path,
    timeout_s: float = 300,
) -> Reading:
    """Write files, of which each has a name below `root` and a size in bytes, with `writers`
    processes, which share them. See writer.py for `how`. Return the sums over the
    writers."""
    list_file.write_text("".join(f"{name} {size}\n" for name, size in files), encoding="utf-8")
    commands = [[_WRITER, root, list_file, number, writers, how] for number in range(writers)]
    return _run_all(commands, timeout_s, None, lambda: None)


def _run_all(
    commands: Sequence[Sequence[object]],
    timeout_s: float,
    on_progress: Callable[[int], None] | None,
    before_go: Callable[[], None],
) -> Reading:
    processes = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-E", *map(str, command)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        return _follow(processes, timeout_s, on_progress, before_go)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _follow(
    processes: list[subprocess.Popen[bytes]],
    timeout_s: float,
    on_progress: Callable[[int], None] | None,
    before_go: Callable[[], None],
) -> Reading:
    deadline = time.monotonic() + timeout_s
    at = dict.fromkeys(range(len(processes)), 0)
    done: dict[int, list[str]] = {}
    waiting, started = set(at), False
    with selectors.DefaultSelector() as selector:
        buffers = dict.fromkeys(at, b"")
        for number, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, number)
        while len(done) < len(processes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the readers did not end within {timeout_s:.0f} s")
            for key, _ in selector.select(1.0):
                number = key.data
                data = os.read(key.fd, 65536)
                if not data:
                    if number not in done:
                        raise RuntimeError("a reader failed; its error stands above")
                    selector.unregister(key.fileobj)
                    continue
                *lines, buffers[number] = (buffers[number] + data).split(b"\n")
                for line in lines:
                    word, *rest = line.decode().split()
                    if word == "ready":
                        waiting.discard(number)
                    else:
                        at[number] = int(rest[0])
                        if word == "done":
                            done[number] = rest
            if not waiting and not started:
                started = True
                before_go()
                _go(processes)
            elif on_progress is not None:
                on_progress(sum(at.values()))
    began = min(float(rest[2]) for rest in done.values())
    ended = max(float(rest[3]) for rest in done.values())
    return Reading(
        sum(int(rest[0]) for rest in done.values()),
        sum(int(rest[1]) for rest in done.values()),
        ended - began,
    )


def _go(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()


def can_drop_caches() -> bool:
    """Return whether the kernel's page cache can be dropped: as root, and not in a container."""
    return os.geteuid() == 0 and os.access(_DROP_CACHES, os.W_OK)


def drop_page_cache(names_too: bool = False) -> None:
    """Write everything back and drop clean pages. Directory entries and inodes stay, unless
    `names_too`."""
    os.sync()
    _DROP_CACHES.write_text("3\n" if names_too else "1\n")


def list_directory(path: Path, timeout_s: float = 120) -> tuple[int, float]:
    """Return the number of names, without "." and "..", and the seconds of `ls -f`."""
    began = time.monotonic()
    result = subprocess.run(
        ["ls", "-f", str(path)], stdout=subprocess.PIPE, timeout=timeout_s, check=True
    )
    seconds = time.monotonic() - began
    return result.stdout.count(b"\n") - 2, seconds
