"""The peers: cachefs, JuiceFS, rclone, s3fs-fuse, geesefs, mountpoint-s3, and the local disk."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from bench import juicefs, rig
from bench.peers.peer import Cache, ForegroundPeer, Peer

_COPIES = 32
_NO_COMMAND = "it has no command that loads ahead"
_GEESEFS_MEMORY_BYTES = 1000 << 20
"""How much geesefs keeps in memory by default, before it uses its cache on disk."""


class Cachefs(Peer):
    """cachefs with the defaults of the command line."""

    kind = "cachefs"
    bucket = rig.BUCKET
    _mounted: rig.Mount | None = None

    @property
    def command_line(self) -> str:
        return self._mounted.command_line if self._mounted else ""

    def cache_dir(self, in_memory: bool) -> Path:
        return super().cache_dir(in_memory) if in_memory else self.base / "cache"

    def version(self) -> str:
        words = _output(*rig.cachefs_command(), "--version").split()
        return words[-1] if words else "unknown"

    def warm_up(self, prefix: str) -> None:
        assert self._mounted is not None
        self._mounted.command("load", str(self.path / prefix))

    def _mount(self, cache: Cache) -> None:
        size = str(cache.size_bytes)
        options = ["--cache-size", size, "--free-space-ratio", "0.01"]
        if cache.in_memory:
            options += ["--mem-size", size, "--mem-dir", str(self.cache_dir(in_memory=True))]
        self._mounted = rig.Mount(
            self.base,
            f"s3://{rig.BUCKET}",
            self.bench.environment,
            self.bench.server.endpoint,
            [*options, *self.options],
        )
        self._mounted.__enter__()

    def _unmount(self) -> None:
        if self._mounted is not None:
            self._mounted.unmount()


class JuiceFS(Peer):
    """JuiceFS with its metadata in SQLite and its blocks in a separate bucket."""

    kind = "JuiceFS"
    bucket = juicefs.BUCKET

    def prepare(self) -> None:
        self._volume = juicefs.JuiceFS(self.bench, self.options)
        self.base = self._volume.path.parent
        self._volume.format()

    @property
    def command_line(self) -> str:
        return self._volume.command_line

    def version(self) -> str:
        return self._volume.version()

    def fill(self, prefix: str) -> None:
        """Write the data set through a mount. The directories of `names` are identical, so they
        are cloned."""
        self._volume.mount(self.cache_dir(in_memory=False))
        source, target = self.bench.local / prefix, self.path / prefix
        if prefix == "names":
            self._clone(source, target)
        else:
            _copy_tree(source, target)
        self._volume.unmount()
        self.wipe()

    def _clone(self, source: Path, target: Path) -> None:
        """Write one directory, clone it within its group, and clone the group for the others."""
        first_group, *groups = sorted(source.iterdir())
        first, *others = sorted(first_group.iterdir())
        copied = target / first_group.name / first.name
        _copy_tree(first, copied)
        for other in others:
            self._volume.call("clone", str(copied), str(copied.with_name(other.name)))
        for group in groups:
            self._volume.call("clone", str(copied.parent), str(target / group.name))

    def warm_up(self, prefix: str) -> None:
        self._volume.call("warmup", "-p", "32", str(self.path / prefix))

    def hits(self) -> tuple[int, int] | None:
        """Return JuiceFS's own counts: it sends several GETs for one file, so a count of GETs
        would be unfair."""
        counts = dict.fromkeys(("hit", "miss"), 0)
        for line in (self.path / ".stats").read_text().splitlines():
            for kind in counts:
                if line.startswith(f"juicefs_blockcache_{kind}_bytes "):
                    counts[kind] = int(float(line.split()[1]))
        return counts["hit"], counts["miss"]

    def abandon(self) -> None:
        super().abandon()
        if self._volume.process is not None:
            self._volume.process.wait()
            self._volume.process = None

    def _mount(self, cache: Cache) -> None:
        self._volume.mount(self.cache_dir(cache.in_memory), max(cache.size_bytes >> 20, 1))

    def _unmount(self) -> None:
        self._volume.unmount()


class Rclone(ForegroundPeer):
    """`rclone mount` with its VFS cache, and modification times from the S3 listing."""

    kind = "rclone"
    bucket = rig.BUCKET
    lacks: ClassVar[Mapping[str, str]] = {"warmup": _NO_COMMAND}

    @property
    def command_line(self) -> str:
        return shlex.join(["rclone", *self._command[1:]])

    def version(self) -> str:
        return _output(_rclone(), "version").partition("\n")[0].removeprefix("rclone v")

    def _mount(self, cache: Cache) -> None:
        server = self.bench.server
        environment = {
            "RCLONE_CONFIG_BENCH_TYPE": "s3",
            "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_BENCH_ENDPOINT": server.endpoint,
            "RCLONE_CONFIG_BENCH_REGION": server.region,
            "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": server.access_key,
            "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": server.secret_key,
            "RCLONE_CONFIG": os.devnull,
        }
        command = [_rclone(), "mount", f"bench:{rig.BUCKET}", str(self.path), *self.words(cache)]
        self.start(command, environment)

    def words(self, cache: Cache) -> list[str]:
        """Return the options of its mount."""
        return [
            "--read-only", "--vfs-cache-mode", "full", "--dir-cache-time", "1h", "--attr-timeout",
            "1h", "--use-server-modtime", "--vfs-fast-fingerprint", "--vfs-cache-max-age", "24h",
            "--vfs-cache-max-size", f"{cache.size_bytes >> 20}Mi", "--vfs-cache-poll-interval",
            "5s", "--cache-dir", str(self.cache_dir(cache.in_memory)), *self.options,
        ]  # fmt: skip


class S3fs(ForegroundPeer):
    """s3fs-fuse from Debian."""

    kind = "s3fs"
    bucket = rig.BUCKET
    lacks: ClassVar[Mapping[str, str]] = {
        "warmup": _NO_COMMAND,
        "epochs": "its cache can't be given a size",
    }

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("s3fs"):
            return None
        return "s3fs is not installed (apt-get install s3fs)"

    @property
    def command_line(self) -> str:
        return shlex.join(self._command)

    def version(self) -> str:
        words = _output("s3fs", "--version").split()
        return words[words.index("System") + 1].lstrip("V") if "System" in words else "unknown"

    def _mount(self, cache: Cache) -> None:
        server = self.bench.server
        passwords = self.base / "passwd"
        passwords.write_text(f"{server.access_key}:{server.secret_key}\n")
        passwords.chmod(0o600)
        words = [
            f"url={server.endpoint}", "use_path_request_style", f"endpoint={server.region}",
            f"passwd_file={passwords}", f"use_cache={self.cache_dir(cache.in_memory)}",
            "kernel_cache", "ro", "stat_cache_expire=3600", "max_stat_cache_size=200000",
            "enable_noobj_cache", "complement_stat", *self.options,
        ]  # fmt: skip
        command = ["s3fs", rig.BUCKET, str(self.path), "-f", "-o", ",".join(words)]
        self.start(command, {})


class _OwnBinary(ForegroundPeer):
    """A peer that no package brings: an environment variable names its binary."""

    bucket = rig.BUCKET
    variable: ClassVar[str]

    @classmethod
    def missing(cls) -> str | None:
        binary = os.environ.get(cls.variable)
        usable = binary and os.access(binary, os.X_OK)
        return None if usable else f"{cls.variable} names no binary of it"

    @property
    def binary(self) -> str:
        return os.environ[self.variable]

    @property
    def command_line(self) -> str:
        return shlex.join([Path(self.binary).name, *self._command[1:]])


class Geesefs(_OwnBinary):
    """geesefs with a cache on disk, for what doesn't fit into its memory."""

    kind = "geesefs"
    variable = "GEESEFS"
    lacks: ClassVar[Mapping[str, str]] = {
        "warmup": _NO_COMMAND,
        "epochs.hits": "it may send several GETs for one file, and doesn't count hits itself",
    }
    remarks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("cached.dropped", "memory.dropped", "large.dropped", "lmdb.dropped"),
        "from its own memory: it uses its cache on disk for what exceeds 1,000 MB",
    )

    def version(self) -> str:
        return _output(self.binary, "--version").rpartition(" ")[2]

    def words(self, cache: Cache) -> list[str]:
        """Return the options of its mount. Only its memory has a limit, not its cache on disk."""
        if cache.size_bytes < _GEESEFS_MEMORY_BYTES:
            return ["--memory-limit", str(cache.size_bytes >> 20), *self.options]
        return ["--cache", str(self.cache_dir(cache.in_memory)), *self.options]

    def _mount(self, cache: Cache) -> None:
        server = self.bench.server
        command = [
            self.binary, "-f", "--endpoint", server.endpoint, "--region", server.region,
            "--stat-cache-ttl", "1h", *self.words(cache), rig.BUCKET, str(self.path),
        ]  # fmt: skip
        self.start(command, server.environment)


class Mountpoint(_OwnBinary):
    """mountpoint-s3 with its local cache."""

    kind = "mountpoint"
    variable = "MOUNTPOINT_S3"
    lacks: ClassVar[Mapping[str, str]] = {"warmup": _NO_COMMAND}

    def version(self) -> str:
        return _output(self.binary, "--version").rpartition(" ")[2]

    def words(self, cache: Cache) -> list[str]:
        """Return the options of its mount."""
        directory = self.cache_dir(cache.in_memory)
        directory.mkdir(parents=True, exist_ok=True)
        return [
            "--read-only", "--metadata-ttl", "3600", "--cache", str(directory),
            "--max-cache-size", str(cache.size_bytes >> 20), *self.options,
        ]  # fmt: skip

    def _mount(self, cache: Cache) -> None:
        server = self.bench.server
        command = [
            self.binary, rig.BUCKET, str(self.path), "--foreground", "--force-path-style",
            "--endpoint-url", server.endpoint, "--region", server.region, *self.words(cache),
        ]  # fmt: skip
        self.start(command, {**server.environment, "AWS_EC2_METADATA_DISABLED": "true"})


class Local(Peer):
    """The local files from which the data sets were uploaded, without a mount."""

    kind = "local"
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("cold", "large.cold", "lmdb.cold", "warmup", "epochs"), "local files need no fetching"
        ),
        **dict.fromkeys(("cpu", "rss", "busiest", "most"), "the kernel does the work"),
        "memory": "for local, see the rows of the SSD",
    }

    @property
    def path(self) -> Path:
        return self.bench.local

    def version(self) -> str:
        return os.uname().release

    def prepare(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def wipe(self) -> None:
        """Drop the page cache with names, so that names come from the disk again, too."""
        with contextlib.suppress(OSError):
            rig.drop_page_cache(names_too=True)

    def _mount(self, cache: Cache) -> None:
        pass

    def _unmount(self) -> None:
        pass


PEERS: tuple[type[Peer], ...] = (Cachefs, JuiceFS, Rclone, S3fs, Geesefs, Mountpoint, Local)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy only the bytes, many files at a time, because closing a file waits for its upload."""
    files = []
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir()
        else:
            files.append(path)
    with ThreadPoolExecutor(_COPIES) as pool:
        for _ in pool.map(lambda path: shutil.copyfile(path, target / path.relative_to(source)),
                          files):  # fmt: skip
            pass


def _rclone() -> str:
    return str(Path(sys.executable).with_name("rclone"))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()
