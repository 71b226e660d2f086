"""`MountConfig`: what a daemon is built from, and what `cachefs mount --help` is made of."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cachefs.config.fields import (
    DURATION,
    MODE,
    OPTIONAL_PATH,
    PATH,
    PATHS,
    RATIO,
    SWITCH,
    TEXT,
    Flag,
    Group,
    choice,
    count,
    default_cache_dirs,
    size,
)

MIN_CACHE_DIR_BYTES = 64 << 20
"""Least capacity of one cache directory: one slab."""


class MountConfig(BaseModel):
    """One mount. Immutable. Sizes are bytes, times seconds (`math.inf`: indefinite).

    Field names are the option names with underscores, except `cache_dirs` (`--cache-dir`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, TEXT]
    mountpoint: Annotated[Path, PATH]

    endpoint: Annotated[
        str | None,
        TEXT,
        Flag(
            ("--endpoint",), metavar="URL", group=Group.ORIGIN, shown_default="the provider's own"
        ),
    ] = Field(None, description="Address of the object store, such as http://127.0.0.1:9000.")
    region: Annotated[
        str | None,
        TEXT,
        Flag(
            ("--region",), metavar="NAME", group=Group.ORIGIN, shown_default="from the environment"
        ),
    ] = Field(None, description="Region of the bucket.")
    addressing: Annotated[
        Literal["auto", "path", "virtual"],
        choice("auto", "path", "virtual"),
        Flag(("--addressing",), metavar="auto|path|virtual", group=Group.ORIGIN),
    ] = Field(
        "auto",
        description="Whether the bucket stands in the path or in the host name of requests.",
    )
    anonymous: Annotated[bool, SWITCH, Flag(("--anonymous",), group=Group.ORIGIN)] = Field(
        False, description="Send unsigned requests; for public buckets."
    )
    profile: Annotated[
        str | None,
        TEXT,
        Flag(
            ("--profile",), metavar="NAME", group=Group.ORIGIN, shown_default="from the environment"
        ),
    ] = Field(None, description="Profile of the credential files to use.")
    max_downloads: Annotated[
        int,
        count(1, 4096),
        Flag(("--max-downloads",), metavar="N", group=Group.ORIGIN),
    ] = Field(64, description="Most requests to the origin at one time.")

    cache_dirs: Annotated[
        tuple[Path, ...],
        PATHS,
        Flag(
            ("--cache-dir",),
            metavar="DIR[:DIR...]",
            group=Group.CACHE,
            shown_default="/var/cache/cachefs/ID for root, else ~/.cache/cachefs/ID",
        ),
    ] = Field(
        default_factory=default_cache_dirs,
        description="Where to keep cached blocks; several directories share the load. Each serves "
        "one mount at a time.",
    )
    cache_size: Annotated[
        int, size(MIN_CACHE_DIR_BYTES), Flag(("--cache-size",), metavar="SIZE", group=Group.CACHE)
    ] = Field(100 << 30, description="Most bytes to keep, over all cache directories together.")
    free_space_ratio: Annotated[
        float, RATIO, Flag(("--free-space-ratio",), metavar="RATIO", group=Group.CACHE)
    ] = Field(0.1, description="Share of each cache file system to leave free.")
    cache_high: Annotated[
        float, RATIO, Flag(("--cache-high",), metavar="RATIO", group=Group.CACHE)
    ] = Field(0.95, description="Start to evict above this share of the cache size.")
    cache_low: Annotated[
        float, RATIO, Flag(("--cache-low",), metavar="RATIO", group=Group.CACHE)
    ] = Field(0.85, description="Evict down to this share of the cache size.")
    cache_eviction: Annotated[
        Literal["lru", "none"],
        choice("lru", "none"),
        Flag(("--cache-eviction",), metavar="lru|none", group=Group.CACHE),
    ] = Field(
        "lru",
        description="What makes room: lru drops what was read longest ago; none keeps what is "
        "there and admits nothing more.",
    )

    attr_ttl: Annotated[
        float, DURATION, Flag(("--attr-ttl", "--attr-cache"), metavar="TIME", group=Group.METADATA)
    ] = Field(600.0, description="How long size and time of a file are believed.")
    entry_ttl: Annotated[
        float,
        DURATION,
        Flag(("--entry-ttl", "--entry-cache"), metavar="TIME", group=Group.METADATA),
    ] = Field(600.0, description="How long a name that was found is believed.")
    list_ttl: Annotated[
        float,
        DURATION,
        Flag(("--list-ttl", "--dir-entry-cache"), metavar="TIME", group=Group.METADATA),
    ] = Field(600.0, description="How long a directory's listing is believed.")
    negative_ttl: Annotated[
        float,
        DURATION,
        Flag(("--negative-ttl", "--negative-entry-cache"), metavar="TIME", group=Group.METADATA),
    ] = Field(60.0, description="How long the absence of a name is believed.")

    buffer_size: Annotated[
        int, size(8 << 20), Flag(("--buffer-size",), metavar="SIZE", group=Group.READING)
    ] = Field(300 << 20, description="Most memory for data on its way from the origin.")
    readahead: Annotated[
        int, size(0), Flag(("--readahead", "--max-readahead"), metavar="SIZE", group=Group.READING)
    ] = Field(64 << 20, description="Most to read ahead of one sequential reader; 0 is off.")

    uid: Annotated[
        int,
        count(0, 2**32 - 2),
        Flag(("--uid",), metavar="ID", group=Group.ACCESS, shown_default="the mounting user"),
    ] = Field(default_factory=os.getuid, description="Owner of all files.")
    gid: Annotated[
        int,
        count(0, 2**32 - 2),
        Flag(
            ("--gid",), metavar="ID", group=Group.ACCESS, shown_default="the mounting user's group"
        ),
    ] = Field(default_factory=os.getgid, description="Group of all files.")
    file_mode: Annotated[int, MODE, Flag(("--file-mode",), metavar="OCTAL", group=Group.ACCESS)] = (
        Field(0o644, description="Permission bits of files; they are read-only all the same.")
    )
    dir_mode: Annotated[int, MODE, Flag(("--dir-mode",), metavar="OCTAL", group=Group.ACCESS)] = (
        Field(0o755, description="Permission bits of directories.")
    )
    allow_other: Annotated[
        bool,
        SWITCH,
        Flag(
            ("--allow-other/--no-allow-other",),
            group=Group.ACCESS,
            shown_default="allowed for root",
        ),
    ] = Field(
        default_factory=lambda: os.geteuid() == 0, description="Let other users read the mount."
    )
    nonempty: Annotated[bool, SWITCH, Flag(("--nonempty",), group=Group.ACCESS)] = Field(
        False, description="Mount over a directory that has entries; they are hidden meanwhile."
    )
    read_only: Annotated[bool, SWITCH, Flag(("--read-only",), group=Group.ACCESS)] = Field(
        True, description="Accepted for compatibility: mounts are always read-only."
    )

    foreground: Annotated[bool, SWITCH, Flag(("-f", "--foreground"), group=Group.PROCESS)] = Field(
        False, description="Stay in the foreground and log to the terminal."
    )
    log_file: Annotated[
        Path | None,
        OPTIONAL_PATH,
        Flag(
            ("--log-file",),
            metavar="FILE",
            group=Group.PROCESS,
            shown_default="/var/log/cachefs/... for root, else ~/.cache/cachefs/log/...",
        ),
    ] = Field(None, description="Where the daemon logs.")
    debug: Annotated[bool, SWITCH, Flag(("--debug",), group=Group.PROCESS)] = Field(
        False, description="Log every decision, and show tracebacks of errors."
    )

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        scheme, separator, rest = source.partition("://")
        if not separator or not scheme:
            raise ValueError(
                f'"{source}" is no URL; write s3://BUCKET/PREFIX, or file:///DIR for a directory'
            )
        if urlsplit(f"x://{rest}").password is not None:
            raise ValueError(
                "a source must not carry a password; credentials come from the environment "
                "(AWS_ACCESS_KEY_ID, ...) or from ~/.aws/credentials"
            )
        return source

    @field_validator("read_only")
    @classmethod
    def _check_read_only(cls, read_only: bool) -> bool:
        if not read_only:
            raise ValueError("false is not possible; mounts are always read-only")
        return read_only

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not 0 < self.cache_low < self.cache_high:
            raise ValueError(
                f"cache_low ({self.cache_low:g}) must be above 0 and below "
                f"cache_high ({self.cache_high:g})"
            )
        least = MIN_CACHE_DIR_BYTES * len(self.cache_dirs)
        if self.cache_size < least:
            raise ValueError(
                f"cache_size must be at least {least >> 20}MiB for {len(self.cache_dirs)} cache "
                "directories; raise it or name fewer of them"
            )
        for name, path in [
            *(("cache_dir", d) for d in self.cache_dirs),
            ("log_file", self.log_file),
        ]:
            if path is not None and path.is_relative_to(self.mountpoint):
                raise ValueError(
                    f"{name} {path} lies below the mountpoint {self.mountpoint}, which would wait "
                    "for itself; choose another place"
                )
        return self
