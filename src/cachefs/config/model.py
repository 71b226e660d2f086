"""`MountConfig`, the configuration of a daemon and the source of `cachefs mount --help`."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cachefs.config.address import ADDRESS
from cachefs.config.fields import (
    DURATION,
    FILE_OR_URL,
    LIMITS,
    MAX_DOWNLOADS,
    MODE,
    OPTIONAL_PATH,
    PATH,
    PATHS,
    RATE,
    RATIO,
    SWITCH,
    TEXT,
    Flag,
    Group,
    check_ratio,
    choice,
    count,
    default_cache_dirs,
    default_mem_dir,
    show,
    size,
)
from cachefs.config.source_url import refuse_secrets, shown
from cachefs.config.tiers import MIN_CACHE_DIR_BYTES, TierConfig
from cachefs.types import Medium

_SHORTHANDS = ("cache_dirs", "cache_size", "mem_size", "mem_dir")
"""Options that describe the tiers if there is no `[[tier]]` table."""

_HIGH, _LOW = 0.97, 0.92

_RATIOS = {
    "high": "cache_high",
    "low": "cache_low",
    "free_space_ratio": "free_space_ratio",
    "pin_limit": "pin_limit",
}
"""The options of the mount that a tier's table inherits, by key of the table."""


class MountConfig(BaseModel):
    """The configuration of one mount. Immutable. Sizes are in bytes, times in seconds (`math.inf`:
    indefinite).

    Field names are the option names with underscores, except `cache_dirs` (`--cache-dir`) and
    `tier_tables` (`[[tier]]` in a file). The cache consists of `tiers`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

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
    credentials_dir: Annotated[
        Path | None,
        OPTIONAL_PATH,
        Flag(("--credentials-dir",), metavar="DIR", group=Group.ORIGIN, shown_default="none"),
    ] = Field(
        None,
        description="Directory with the files access_key_id, secret_access_key and, if there is "
        "one, session_token, as Kubernetes mounts a Secret; read again when they change.",
    )
    verify_origin: Annotated[
        Literal["auto", "off"],
        choice("auto", "off"),
        Flag(("--verify-origin",), metavar="auto|off", group=Group.ORIGIN),
    ] = Field(
        "auto",
        description="Whether files that come in one piece are compared with the digest that the "
        "store gives.",
    )
    oss_driver: Annotated[
        Literal["native", "ossfs"],
        choice("native", "ossfs"),
        Flag(("--oss-driver",), metavar="native|ossfs", group=Group.ORIGIN),
    ] = Field("native", description="How oss:// is read: through OSS's S3 interface, or by ossfs.")
    hdfs_driver: Annotated[
        Literal["native", "pyarrow"],
        choice("native", "pyarrow"),
        Flag(("--hdfs-driver",), metavar="native|pyarrow", group=Group.ORIGIN),
    ] = Field(
        "native",
        description="How hdfs:// is read: by hdfs-native, or by pyarrow with the site's libhdfs.",
    )
    max_downloads: Annotated[
        int,
        MAX_DOWNLOADS,
        Flag(("--max-downloads",), metavar="N", group=Group.ORIGIN, live=True),
    ] = Field(64, description="Most requests to the origin at one time.")
    download_limit: Annotated[
        int,
        RATE,
        Flag(("--download-limit",), metavar="SIZE", group=Group.ORIGIN, live=True),
    ] = Field(0, description="Most bytes per second to read from the origin; 0 for no limit.")
    read_timeout: Annotated[
        float, DURATION, Flag(("--read-timeout",), metavar="TIME", group=Group.ORIGIN)
    ] = Field(
        5.0,
        description="When a read that needs the origin fails at the latest, while the origin "
        "serves nobody.",
    )
    request_timeout: Annotated[
        float, DURATION, Flag(("--request-timeout",), metavar="TIME", group=Group.ORIGIN)
    ] = Field(
        2.0,
        description="How long one request may stay without an answer before it is sent again; "
        "below half of the read timeout, or there is no time for that.",
    )
    hedge: Annotated[bool, SWITCH, Flag(("--hedge/--no-hedge",), group=Group.ORIGIN, live=True)] = (
        Field(
            False,
            description="Send a second request for a block when the first takes longer than 95% of "
            "those before it.",
        )
    )

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
    mem_size: Annotated[
        int,
        size(MIN_CACHE_DIR_BYTES, or_zero=True),
        Flag(("--mem-size",), metavar="SIZE", group=Group.CACHE),
    ] = Field(
        0,
        description="Most bytes to keep in memory, in front of the cache directories; 0 for none. "
        "They stay there when the mount has ended.",
    )
    mem_dir: Annotated[
        Path,
        PATH,
        Flag(
            ("--mem-dir",),
            metavar="DIR",
            group=Group.CACHE,
            shown_default="/dev/shm/cachefs-UID/ID",
        ),
    ] = Field(default_factory=default_mem_dir, description="The directory in memory, on a tmpfs.")
    free_space_ratio: Annotated[
        float, RATIO, Flag(("--free-space-ratio",), metavar="RATIO", group=Group.CACHE)
    ] = Field(0.1, description="Share of each cache file system to leave free.")
    cache_high: Annotated[
        float, RATIO, Flag(("--cache-high",), metavar="RATIO", group=Group.CACHE)
    ] = Field(
        _HIGH,
        description="Above this share of the cache size, evict what the policy lets go; "
        "epoch keeps what is read again and again.",
    )
    cache_low: Annotated[
        float,
        RATIO,
        Flag(
            ("--cache-low",),
            metavar="RATIO",
            group=Group.CACHE,
            shown_default="0.92, or as far below --cache-high in proportion",
        ),
    ] = Field(
        default_factory=lambda data: _usual_low(data.get("cache_high", _HIGH)),
        description="Evict down to this share of the cache size.",
    )
    pin_limit: Annotated[
        float, RATIO, Flag(("--pin-limit",), metavar="RATIO", group=Group.CACHE)
    ] = Field(0.8, description="Most of each cache directory that may be pinned (cachefs pin).")
    tier_tables: tuple[TierConfig, ...] = Field(
        (), description="Instead of the directories and sizes above, in a file: [[tier]]."
    )
    cache_eviction: Annotated[
        Literal["epoch", "lru", "sieve", "2-random", "none"],
        choice("epoch", "lru", "sieve", "2-random", "none"),
        Flag(("--cache-eviction",), metavar="POLICY", group=Group.CACHE),
    ] = Field(
        "epoch",
        description="What makes room. epoch is made for training, where each file is read once an "
        "epoch; lru drops what was read longest ago; sieve and 2-random are for comparison; none "
        "keeps what is there and admits nothing more.",
    )
    verify: Annotated[
        Literal["first", "full"],
        choice("first", "full"),
        Flag(("--verify", "--verify-cache-checksum"), metavar="first|full", group=Group.CACHE),
    ] = Field(
        "first",
        description="What a disk gives is compared with its checksum on every read. With full, so "
        "are blocks in memory tiers, and it is looked up to which block a slot belongs; else that "
        "is done on the first read after each start.",
    )
    scrub_interval: Annotated[
        float, DURATION, Flag(("--scrub-interval",), metavar="TIME", group=Group.CACHE)
    ] = Field(
        7 * 86400.0,
        description="How long until every cached block has been verified again; 0 is never.",
    )

    attr_ttl: Annotated[
        float,
        DURATION,
        Flag(("--attr-ttl", "--attr-cache"), metavar="TIME", group=Group.METADATA, live=True),
    ] = Field(600.0, description="How long size and time of a file are believed.")
    entry_ttl: Annotated[
        float,
        DURATION,
        Flag(("--entry-ttl", "--entry-cache"), metavar="TIME", group=Group.METADATA, live=True),
    ] = Field(600.0, description="How long a name that was found is believed.")
    list_ttl: Annotated[
        float,
        DURATION,
        Flag(("--list-ttl", "--dir-entry-cache"), metavar="TIME", group=Group.METADATA, live=True),
    ] = Field(600.0, description="How long a directory's listing is believed.")
    negative_ttl: Annotated[
        float,
        DURATION,
        Flag(
            ("--negative-ttl", "--negative-entry-cache"),
            metavar="TIME",
            group=Group.METADATA,
            live=True,
        ),
    ] = Field(60.0, description="How long the absence of a name is believed.")
    stale_if_error: Annotated[
        float,
        DURATION,
        Flag(("--stale-if-error",), metavar="TIME", group=Group.METADATA, live=True),
    ] = Field(
        math.inf,
        description="How long beyond these times names, attributes and listings are still shown "
        "while the origin does not answer; 0 is not at all.",
    )

    manifest: Annotated[
        str | None,
        FILE_OR_URL,
        Flag(("--manifest",), metavar="FILE|URL", group=Group.METADATA, shown_default="none"),
    ] = Field(
        None,
        description="Show only the files that this list names, with the sizes and versions that it "
        "gives, and send no LIST; see cachefs manifest --help.",
    )

    buffer_size: Annotated[
        int, size(8 << 20), Flag(("--buffer-size",), metavar="SIZE", group=Group.READING)
    ] = Field(
        300 << 20,
        description="Most memory for data on its way from the origin; a quarter of the control "
        "group's memory limit, if that is less.",
    )
    readahead: Annotated[
        int,
        size(0),
        Flag(("--readahead", "--max-readahead"), metavar="SIZE", group=Group.READING, live=True),
    ] = Field(64 << 20, description="Most to read ahead of one sequential reader; 0 is off.")
    prefetch: Annotated[
        Literal["off", "order"],
        choice("off", "order"),
        Flag(("--prefetch",), metavar="off|order", group=Group.READING),
    ] = Field(
        "order",
        description="Which files are fetched before they are read: with order, the next ones of a "
        "directory whose files are read in name order.",
    )

    uid: Annotated[
        int | None,
        count(0, 2**32 - 2),
        Flag(
            ("--uid",),
            metavar="ID",
            group=Group.ACCESS,
            shown_default="the origin's, else the mounting user",
        ),
    ] = Field(None, description="Owner of all files, whatever the origin says.")
    gid: Annotated[
        int | None,
        count(0, 2**32 - 2),
        Flag(
            ("--gid",),
            metavar="ID",
            group=Group.ACCESS,
            shown_default="the origin's, else the mounting user's group",
        ),
    ] = Field(None, description="Group of all files, whatever the origin says.")
    squash: Annotated[
        str | None,
        TEXT,
        Flag(("--squash",), metavar="UID:GID", group=Group.ACCESS, shown_default="off"),
    ] = Field(None, description="Short for --uid UID --gid GID: one owner, whoever looks.")
    file_mode: Annotated[
        int | None,
        MODE,
        Flag(
            ("--file-mode",),
            metavar="OCTAL",
            group=Group.ACCESS,
            shown_default="the origin's, else 644",
        ),
    ] = Field(None, description="Permission bits of files; they are read-only all the same.")
    dir_mode: Annotated[
        int | None,
        MODE,
        Flag(
            ("--dir-mode",),
            metavar="OCTAL",
            group=Group.ACCESS,
            shown_default="the origin's, else 755",
        ),
    ] = Field(None, description="Permission bits of directories.")
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
    limit_uid: Annotated[
        dict[int, int],
        LIMITS,
        Flag(
            ("--limit-uid",),
            metavar="UID=SIZE",
            group=Group.ACCESS,
            live=True,
            shown_default="no limits",
            multiple=True,
        ),
    ] = Field(
        {},
        description="Most bytes per second for the readers of a user, cached or not; may be given "
        "several times.",
    )
    nonempty: Annotated[bool, SWITCH, Flag(("--nonempty",), group=Group.ACCESS)] = Field(
        False, description="Mount over a directory that has entries; they are hidden meanwhile."
    )
    read_only: Annotated[bool, SWITCH, Flag(("--read-only",), group=Group.ACCESS)] = Field(
        True, description="Accepted for compatibility: mounts are always read-only."
    )

    data_path: Annotated[
        Literal["auto", "relay", "python"],
        choice("auto", "relay", "python"),
        Flag(("--data-path",), metavar="auto|relay|python", group=Group.PROCESS),
    ] = Field(
        "auto",
        description="Who answers the kernel: relay, compiled code that serves what is cached and "
        "outlives the daemon; or python, the daemon alone. auto is relay where that is possible; "
        "cachefs status shows why it is not.",
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
    metrics: Annotated[
        str, ADDRESS, Flag(("--metrics",), metavar="HOST:PORT|off", group=Group.PROCESS)
    ] = Field(
        "127.0.0.1:9567",
        description="Where Prometheus finds /metrics, and others /healthz and /readyz; when the "
        "default is taken by another mount, a free port, which cachefs status shows.",
    )
    log_format: Annotated[
        Literal["text", "json"],
        choice("text", "json"),
        Flag(("--log-format",), metavar="text|json", group=Group.PROCESS),
    ] = Field("text", description="How the daemon logs; json is one object a line.")
    log_max_size: Annotated[
        int,
        size(64 << 10, or_zero=True),
        Flag(("--log-max-size",), metavar="SIZE", group=Group.PROCESS),
    ] = Field(
        64 << 20,
        description="Rename the log file to FILE.1 at this size, and keep three older ones; 0 is "
        "never, for where logrotate does it.",
    )
    debug: Annotated[bool, SWITCH, Flag(("--debug",), group=Group.PROCESS, live=True)] = Field(
        False,
        description="Log what the origin is asked for and why, too, and tracebacks of errors.",
    )

    @model_validator(mode="before")
    @classmethod
    def _spread_squash(cls, values: dict[str, object]) -> dict[str, object]:
        squash = values.get("squash")
        if squash is None:
            return values
        if "uid" in values or "gid" in values:
            raise ValueError("squash says what uid and gid do, both of them; leave them out")
        uid, _, gid = str(squash).partition(":")
        if not (uid.isdecimal() and gid.isdecimal()):
            raise ValueError(f'squash: {show(squash)} is not UID:GID; write it as "1000:1000"')
        return {**values, "uid": uid, "gid": gid}

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        scheme, separator, _ = source.partition("://")
        if not separator or not scheme:
            raise ValueError(
                f'"{shown(source)}" is no URL; write s3://BUCKET/PREFIX, or file:///DIR for a '
                "directory"
            )
        refuse_secrets(source)
        return source

    @field_validator("read_timeout", "request_timeout")
    @classmethod
    def _check_timeout(cls, timeout_s: float) -> float:
        if not 0.1 <= timeout_s <= 86_400:
            raise ValueError("a timeout is at least 0.1s and at most 1d")
        return timeout_s

    @field_validator("read_only")
    @classmethod
    def _check_read_only(cls, read_only: bool) -> bool:
        if not read_only:
            raise ValueError("false is not possible; mounts are always read-only")
        return read_only

    @field_validator("tier_tables", mode="before")
    @classmethod
    def _fill_in_tiers(cls, tables: object, info: ValidationInfo) -> object:
        """Fill in the mount's ratios in each table that lacks them."""
        if not isinstance(tables, list | tuple) or not tables:
            raise ValueError("write [[tier]], with two brackets, once for each medium")
        ratios = {key: info.data.get(field) for key, field in _RATIOS.items()}
        return [_filled_in(table, ratios) for table in tables]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not 0 < self.cache_low < self.cache_high:
            raise ValueError(
                f"cache_low ({self.cache_low:g}) must be above 0 and below "
                f"cache_high ({self.cache_high:g})"
            )
        self._check_shorthands()
        places = [("cache directory", path) for tier in self.tiers for path in tier.paths]
        _refuse_twice([path for _, path in places])
        if self.log_file is not None:
            places.append(("log_file", self.log_file))
        for name, path in places:
            refuse_below_mountpoint(name, path, self.mountpoint)
        return self

    def _check_shorthands(self) -> None:
        given = [name for name in _SHORTHANDS if name in self.model_fields_set]
        if self.tier_tables:
            if given:
                option = given[0].replace("cache_dirs", "cache_dir")
                raise ValueError(
                    f"{option} and [[tier]] both say what the cache is made of; use one or the "
                    "other"
                )
            return
        if "mem_dir" in given and "mem_size" not in given:
            raise ValueError("mem_dir needs mem_size, or nothing is kept there; give both")
        least = MIN_CACHE_DIR_BYTES * len(self.cache_dirs)
        if self.cache_size < least:
            raise ValueError(
                f"cache_size must be at least {least >> 20}MiB for {len(self.cache_dirs)} cache "
                "directories; raise it or name fewer of them"
            )

    @property
    def tiers(self) -> tuple[TierConfig, ...]:
        """The tiers of the cache, fastest medium first."""
        if self.tier_tables:
            fastest_first = list(Medium)
            return tuple(sorted(self.tier_tables, key=lambda t: fastest_first.index(t.medium)))
        disks = self._shorthand(Medium.SSD, self.cache_dirs, self.cache_size)
        if self.mem_size == 0:
            return (disks,)
        return (self._shorthand(Medium.MEM, (self.mem_dir,), self.mem_size), disks)

    def _shorthand(self, medium: Medium, paths: tuple[Path, ...], quota_bytes: int) -> TierConfig:
        return self.tier_from({"medium": medium, "path": paths, "quota": quota_bytes})

    def tier_from(self, table: Mapping[str, object]) -> TierConfig:
        """Return the tier that a `[[tier]]` table describes. Raises pydantic's
        `ValidationError`."""
        ratios = {key: getattr(self, field) for key, field in _RATIOS.items()}
        return TierConfig.model_validate(_filled_in(table, ratios))


def _filled_in(table: object, ratios: Mapping[str, float | None]) -> object:
    """Return a tier's table with the mount's ratios for missing keys. A `high` without a `low`
    also changes `low`, unless the mount sets its own `low`."""
    if not isinstance(table, Mapping):
        return table
    filled = {**ratios, **table}
    usual = _usual_low(ratios["high"] or _HIGH)
    if "high" in table and "low" not in table and ratios["low"] == usual:
        with suppress(ValueError):  # `TierConfig` raises it again with an explanation
            filled["low"] = _usual_low(check_ratio(table["high"]))
    return filled


def _usual_low(high: float) -> float:
    return round(high * _LOW / _HIGH, 4)


def refuse_below_mountpoint(name: str, path: Path, mountpoint: Path) -> None:
    """Raise `ValueError` if `path` lies below the mountpoint: a daemon that used it would wait for
    itself."""
    if path.is_relative_to(mountpoint):
        raise ValueError(
            f"{name} {path} lies below the mountpoint {mountpoint}, which would wait for itself; "
            "choose another place"
        )


def _refuse_twice(paths: list[Path]) -> None:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} stands in two tiers; each needs a directory of its own")
