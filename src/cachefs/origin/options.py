"""How an origin is to be reached: plain values, checked where they are used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Addressing = Literal["auto", "path", "virtual"]
HdfsDriver = Literal["native", "pyarrow"]
OssDriver = Literal["native", "ossfs"]
VerifyOrigin = Literal["auto", "off"]

CHECK_DEADLINE_S = 4.0
"""`Origin.check` answers within this time, so that a mount fails within 5 s."""


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """Everything about an origin but its URL. None means: ask the environment.

    `max_downloads` bounds the requests in flight. `request_timeout_s` bounds one request,
    body included. `credentials_dir` is for S3 and OSS; see `credential_files`. `verify_origin`:
    whether digests that an object store gives are compared.
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
