"""What the sources of writable mounts have, seen without the mount."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tests.mount.harness import Site
from tests.servers.s3_server import S3Server

_HIDDEN = ".cachefs-"
"""Uploads and probes: no listing of a mount shows them."""
_buckets = count(1)


class Store:
    """The source of a site: a directory."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def names(self) -> list[str]:
        """The paths of all files, sorted."""
        return [name for name in self._all() if _HIDDEN not in name]

    def _all(self) -> list[str]:
        files = self.site.files
        return sorted(str(path.relative_to(files)) for path in files.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        """The content of one file."""
        return (self.site.files / name).read_bytes()

    def read_if_there(self, name: str) -> bytes | None:
        """The content of one file; None if there is none."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file as another client would."""
        (self.site.files / name).write_bytes(data)

    def make_directory(self, name: str) -> None:
        """Make an empty directory as another client would."""
        (self.site.files / name).mkdir()

    def delete(self, name: str) -> None:
        """Remove a file as another client would."""
        (self.site.files / name).unlink()

    def uploads(self) -> list[str]:
        """The uploads that are open: in a directory the hidden files, which `names` leaves out."""
        return [name for name in self._all() if _HIDDEN in name]


class S3Store(Store):
    """The source of a site: a prefix of a bucket."""

    def __init__(self, site: Site, server: S3Server, bucket: str) -> None:
        super().__init__(site)
        self._server = server
        self.bucket = bucket

    def names(self) -> list[str]:
        found: list[str] = []
        for page in self._server.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix="prefix/"
        ):
            found += [entry["Key"].removeprefix("prefix/") for entry in page.get("Contents", [])]
        return sorted(
            name for name in found if name and not name.endswith("/") and _HIDDEN not in name
        )

    def metadata(self, name: str) -> dict[str, str]:
        """The user metadata of one object."""
        client = self._server.client
        found: dict[str, str] = client.head_object(Bucket=self.bucket, Key=f"prefix/{name}")[
            "Metadata"
        ]
        return found

    def read(self, name: str) -> bytes:
        client = self._server.client
        try:
            answer = client.get_object(Bucket=self.bucket, Key=f"prefix/{name}")
        except client.exceptions.NoSuchKey:
            raise FileNotFoundError(name) from None
        with answer["Body"] as body:
            data: bytes = body.read()
        return data

    def write(self, name: str, data: bytes) -> None:
        self._server.put(self.bucket, f"prefix/{name}", data)

    def make_directory(self, name: str) -> None:
        self._server.put(self.bucket, f"prefix/{name}/", b"")

    def delete(self, name: str) -> None:
        self._server.delete(self.bucket, f"prefix/{name}")

    def uploads(self) -> list[str]:
        answer = self._server.client.list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in answer.get("Uploads", [])]


@contextmanager
def local_store(root: Path) -> Iterator[Store]:
    """A site of a local directory, and what it has."""
    site = Site(root)
    try:
        yield Store(site)
    finally:
        site.tear_down()


@contextmanager
def s3_store(
    root: Path, server: S3Server, name: str, endpoint: str | None = None
) -> Iterator[S3Store]:
    """A site of a bucket of its own, and what it has. The mount sends its requests to `endpoint`,
    by default the server itself."""
    bucket = server.make_bucket(f"{name}-{next(_buckets)}")
    site = Site(root, f"s3://{bucket}/prefix")
    site.environment = dict(server.environment)
    if endpoint is not None:
        site.environment["AWS_ENDPOINT_URL"] = endpoint
    site.expected_trouble = ("an empty directory is shown until there is",)
    try:
        yield S3Store(site, server, bucket)
    finally:
        site.tear_down()
