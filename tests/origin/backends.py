"""The stores behind the contract suite: each can be written to, and opens as an origin."""

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from tests.memory_origin import MemoryOrigin
from tests.servers.hdfs import Hdfs as HdfsServer
from tests.servers.s3_server import S3Server
from tests.servers.store import Store
from tests.servers.store_dials import AISTORE, GCS, PROFILES
from tests.sizes import IS_LONG

BUCKET = "contract"
STORES = [f"store-{name}" for name in PROFILES if IS_LONG or PROFILES[name] in (GCS, AISTORE)]
"""The profiles of the store with dials: all of them in `make test-long`."""
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
    sees_below = False
    """One LIST shows whole trees."""
    reads_many = False
    """Small objects are asked for together."""
    checks_absent = True
    """A write to a name that must be free is refused by the store itself."""
    copies_parts = True
    """An upload can take a part of another object."""
    completes_again = False
    """A second completion of an upload succeeds whatever came after the first."""

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
    sees_below = True
    reads_many = True
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


class S3fs(S3):
    name = "s3fs"
    conditional_reads = False
    sees_below = reads_many = False
    scheme = "fsspec+s3"


class Dialled(S3):
    """A store with dials, of the test's own."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.name = f"store-{store.dials.name}"
        self.scheme = store.scheme
        self.impossible = "" if store.dials.backslash else "\\"
        self.checks_absent = store.dials.put_absent == "checks" or store.dials.forbid_overwrite
        self.copies_parts = "UploadPartCopy" not in store.dials.lacks
        self.completes_again = store.dials.completes_again == "always"
        store.make_bucket(BUCKET)

    def fill_dir(self) -> int:
        self.put_many({f"dir/f{number:05}": b"" for number in range(MANY)})
        return MANY


class Ossfs(Dialled):
    """OSS in its own dialect, by its own SDK, which has the bucket of an IP address in the path."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.name = "ossfs"
        self.conditional_reads = self.sees_below = self.reads_many = False

    def open(self) -> Origin:
        options = OriginOptions(self.server.endpoint, oss_driver="ossfs")
        return open_origin(f"oss://{BUCKET}/{self.prefix}", options)


@contextmanager
def dialled(name: str, environment: pytest.MonkeyPatch) -> Iterator[Dialled]:
    """The backend of one of `STORES`, which clients find."""
    with Store(PROFILES[name.removeprefix("store-")]) as store:
        for variable, value in store.environment.items():
            environment.setenv(variable, value)
        yield Dialled(store)


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
