"""Options for reaching an origin. They are plain values; the code that uses them checks them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Addressing = Literal["auto", "path", "virtual"]
HdfsDriver = Literal["native", "pyarrow"]
OssDriver = Literal["native", "ossfs"]
FollowLinks = Literal["owner", "all"]
VerifyOrigin = Literal["auto", "off"]

CHECK_DEADLINE_S = 4.0
"""`Origin.check` returns or fails within this time, so that a mount fails within 5 s."""
LISTING_PATIENCE_S = 60.0
"""How much longer than other answers one page of a listing may take, while the origin answers other
requests."""
QUICK_READ_S = 1.0
"""How long a read without a task may take. Then a task sends it again."""


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """Everything about an origin except its URL. None means: use the environment.

    `max_threads` limits the threads and connections for requests, including abandoned requests.
    `total_timeout_s` limits one request, including its body; `idle_timeout_s` the time in which no
    byte arrives. `credentials_dir` is for S3 and OSS; see `credential_files`. `ca_file` is for
    them, too: a PEM file with the CAs of the store. `verify_origin` decides whether bytes are
    compared with the digests that an object store gives. `follow_links` says which symbolic links
    of `file://` are followed; see `ConfinedFileSystem`. `sse`, `sse_kms_key`, `storage_class`,
    `acl` and `tags` (KEY=VALUE&KEY=VALUE) are what new objects of S3 and OSS get."""

    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    anonymous: bool = False
    requester_pays: bool = False
    profile: str | None = None
    credentials_dir: Path | None = None
    ca_file: Path | None = None
    max_threads: int = 64
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 30.0
    idle_timeout_s: float = 30.0
    follow_links: FollowLinks = "owner"
    hdfs_driver: HdfsDriver = "native"
    oss_driver: OssDriver = "native"
    verify_origin: VerifyOrigin = "auto"
    sse: str | None = None
    sse_kms_key: str | None = None
    storage_class: str | None = None
    acl: str | None = None
    tags: str | None = None
