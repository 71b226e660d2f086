"""The stores behind the contract suite: each can be written to, and opens as an origin."""

import itertools
import os
from abc import ABC, abstractmethod
from pathlib import Path

import fsspec

from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from tests.memory_origin import MemoryOrigin
from tests.servers.hdfs import Hdfs as HdfsServer
from tests.servers.s3_server import S3Server

BUCKET = "contract"
MANY = 10_000
_roots = itertools.count()


class Backend(ABC):
    """One empty tree in one store."""

    name: str
    conditional_reads = False
    """One request per read: the store itself checks the version."""
    directories_are_real = False
    """A file can't have entries below it."""
    impossible = ""
    """Characters that no name in the store can have."""

    @abstractmethod
    def open(self) -> Origin:
        """The origin for the tree."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Create or replace an object."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object."""

    def put_many(self, objects: dict[str, bytes]) -> None:
        for path, data in objects.items():
            self.put(path, data)

    def fill_dir(self) -> int:
        """Make files `dir/f00000`, ...: some thousands. Returns how many. A store that is slow to
        write to was filled once for the session, with `MANY`."""
        self.put_many({f"dir/f{i:05}": b"x" for i in range(3_000)})
        return 3_000


class Memory(Backend):
    name = "memory"
    conditional_reads = True

    def __init__(self) -> None:
        self.origin = MemoryOrigin()

    def open(self) -> Origin:
        return self.origin

    def put(self, path: str, data: bytes) -> None:
        self.origin.put(path, data)

    def delete(self, path: str) -> None:
        self.origin.delete(path)


class File(Backend):
    name = "file"
    directories_are_real = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> Origin:
        return open_origin(f"file://{self.root}")

    def put(self, path: str, data: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.root.parent / "scratch"
        scratch.write_bytes(data)
        os.replace(scratch, target)

    def delete(self, path: str) -> None:
        (self.root / path).unlink()


class FsspecMemory(Backend):
    name = "fsspec-memory"
    directories_are_real = True

    def __init__(self) -> None:
        self.root = f"/contract{next(_roots)}"
        self.fs = fsspec.filesystem("memory")
        self.fs.mkdir(self.root)

    def open(self) -> Origin:
        return open_origin(f"memory:/{self.root}")

    def put(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{path}", data)

    def delete(self, path: str) -> None:
        self.fs.rm_file(f"{self.root}/{path}")


class S3(Backend):
    name = "s3"
    conditional_reads = True
    impossible = "\\"
    """SeaweedFS takes it for a slash; test_s3_specific has it on another server."""
    scheme = "s3"

    def __init__(self, server: S3Server, prefix: str | None = None) -> None:
        self.server = server
        self.prefix = prefix or f"tree {next(_roots)}/é"

    def open(self) -> Origin:
        return open_origin(f"{self.scheme}://{BUCKET}/{self.prefix}", OriginOptions())

    def put(self, path: str, data: bytes) -> None:
        self.server.put(BUCKET, f"{self.prefix}/{path}", data)

    def delete(self, path: str) -> None:
        self.server.delete(BUCKET, f"{self.prefix}/{path}")

    def put_many(self, objects: dict[str, bytes]) -> None:
        self.server.put_many(BUCKET, {f"{self.prefix}/{k}": v for k, v in objects.items()})

    def fill_dir(self) -> int:
        self.prefix = "many"
        return MANY


class Oss(S3):
    name = "oss"
    scheme = "oss"


class Ossfs(S3):
    """The server behind OSS's own dialect."""

    name = "ossfs"
    conditional_reads = False

    def __init__(self, server: S3Server, endpoint: str) -> None:
        super().__init__(server)
        self.endpoint = endpoint

    def open(self) -> Origin:
        options = OriginOptions(self.endpoint, oss_driver="ossfs")
        return open_origin(f"oss://{BUCKET}/{self.prefix}", options)


class S3fs(S3):
    name = "s3fs"
    conditional_reads = False
    scheme = "fsspec+s3"


class Hdfs(Backend):
    name = "hdfs"
    directories_are_real = True
    impossible = ":"

    def __init__(self, server: HdfsServer) -> None:
        self.server = server
        self.root = f"/tree {next(_roots)}/é%41"
        server.make_dir(self.root)

    def open(self) -> Origin:
        return open_origin(f"{self.server.url}{self.root}")

    def put(self, path: str, data: bytes) -> None:
        self.server.put(f"{self.root}/{path}", data)

    def delete(self, path: str) -> None:
        self.server.delete(f"{self.root}/{path}")

    def put_many(self, objects: dict[str, bytes]) -> None:
        self.server.put_many((f"{self.root}/{k}", v) for k, v in objects.items())

    def fill_dir(self) -> int:
        self.root = "/many"
        return MANY


class WebHdfs(Hdfs):
    name = "webhdfs"

    def open(self) -> Origin:
        return open_origin(f"{self.server.webhdfs_url}{self.root}")
