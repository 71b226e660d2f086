"""Options for reaching an origin. They are plain values; the code that uses them checks them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Addressing = Literal["auto", "path", "virtual"]
HdfsDriver = Literal["native", "pyarrow"]
OssDriver = Literal["native", "ossfs"]
VerifyOrigin = Literal["auto", "off"]

CHECK_DEADLINE_S = 4.0
"""`Origin.check` returns or fails within this time, so that a mount fails within 5 s."""


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """Everything about an origin except its URL. None means: use the environment.

    `max_downloads` limits the requests in flight. `request_timeout_s` limits one request, including
    its body. `credentials_dir` is for S3 and OSS; see `credential_files`. `verify_origin` decides
    whether bytes are compared with the digests that an object store gives.
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    anonymous: bool = False
    profile: str | None = None
    credentials_dir: Path | None = None
    max_downloads: int = 64
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 30.0
    idle_timeout_s: float = 30.0
    hdfs_driver: HdfsDriver = "native"
    oss_driver: OssDriver = "native"
    verify_origin: VerifyOrigin = "auto"
