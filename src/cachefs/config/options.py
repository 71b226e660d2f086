"""The options of a mount, except those of the cache: each is declared here, once.

A field has a check, a `Flag` (its form on the command line), a default and the text for
`cachefs mount --help`. Sizes are in bytes, times in seconds (`math.inf`: indefinite).
"""

import math
import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cachefs.config.address import ADDRESS, OFF
from cachefs.config.fields import (
    CHOICE,
    DURATION,
    FILE_OR_URL,
    LIMITS,
    MAX_DOWNLOADS,
    MODE,
    OPTIONAL_PATH,
    RATE,
    SWITCH,
    TEXT,
    Flag,
    Group,
    count,
    show,
    size,
)
from cachefs.config.shared_option import SHARED


class Section(BaseModel):
    """The options of one group. `MountConfig` consists of all sections. Immutable."""

    # Only `MountConfig` is ever built, when it is first used: no validator is made for a section.
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )

    group: ClassVar[Group]


class OriginSection(Section):
    """The object store, and the requests to it."""

    group = Group.ORIGIN

    endpoint: Annotated[str | None, TEXT, Flag("URL", shown_default="the provider's own")] = Field(
        None, description="Address of the object store, such as http://127.0.0.1:9000."
    )
    region: Annotated[str | None, TEXT, Flag("NAME", shown_default="from the environment")] = Field(
        None, description="Region of the bucket."
    )
    addressing: Annotated[Literal["auto", "path", "virtual"], CHOICE, Flag()] = Field(
        "auto",
        description="Whether the bucket stands in the path or in the host name of requests.",
    )
    anonymous: Annotated[bool, SWITCH, Flag()] = Field(
        False, description="Send unsigned requests; for public buckets."
    )
    profile: Annotated[str | None, TEXT, Flag("NAME", shown_default="from the environment")] = (
        Field(None, description="Profile of the credential files to use.")
    )
    credentials_dir: Annotated[Path | None, OPTIONAL_PATH, Flag("DIR", shown_default="none")] = (
        Field(
            None,
            description="Directory with the files access_key_id, secret_access_key and, if there "
            "is one, session_token, as Kubernetes mounts a Secret; read again when they change.",
        )
    )
    ca_file: Annotated[Path | None, OPTIONAL_PATH, Flag("FILE", shown_default="the system's")] = (
        Field(
            None,
            description="PEM file with the CAs that may sign the certificate of an object store, "
            "in place of those of the system.",
        )
    )
    verify_origin: Annotated[Literal["auto", "off"], CHOICE, Flag()] = Field(
        "auto",
        description="Whether files that come in one piece are compared with the digest that the "
        "store gives.",
    )
    oss_driver: Annotated[Literal["native", "ossfs"], CHOICE, Flag()] = Field(
        "native", description="How oss:// is read: through OSS's S3 interface, or by ossfs."
    )
    hdfs_driver: Annotated[Literal["native", "pyarrow"], CHOICE, Flag()] = Field(
        "native",
        description="How hdfs:// is read: by hdfs-native, or by pyarrow with the site's libhdfs.",
    )
    max_downloads: Annotated[int, MAX_DOWNLOADS, Flag("N", live=True)] = Field(
        64, description="Most requests to the origin at one time."
    )
    download_limit: Annotated[int, RATE, Flag("SIZE", live=True)] = Field(
        0, description="Most bytes per second to read from the origin; 0 for no limit."
    )
    read_timeout: Annotated[float, DURATION, Flag("TIME")] = Field(
        5.0,
        description="When a read that needs the origin fails at the latest, while the origin "
        "serves nobody.",
    )
    request_timeout: Annotated[float, DURATION, Flag("TIME")] = Field(
        2.0,
        description="How long one request may stay without an answer before it is sent again; "
        "below half of the read timeout, or there is no time for that.",
    )
    write_timeout: Annotated[float, DURATION, Flag("TIME")] = Field(
        60.0,
        description="When a close, or another change in a writable mount, fails at the latest, "
        "while the origin takes nothing.",
    )
    hedge: Annotated[bool, SWITCH, Flag(names=("--hedge/--no-hedge",), live=True)] = Field(
        False,
        description="Send a second request for a block when the first takes longer than 95% of "
        "those before it.",
    )

    @field_validator("read_timeout", "request_timeout", "write_timeout")
    @classmethod
    def _check_timeout(cls, timeout_s: float) -> float:
        if not 0.1 <= timeout_s <= 86_400:
            raise ValueError("a timeout is at least 0.1s and at most 1d")
        return timeout_s


class MetadataSection(Section):
    """Names, attributes and listings."""

    group = Group.METADATA

    attr_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--attr-ttl", "--attr-cache"), live=True)
    ] = Field(600.0, description="How long size and time of a file are believed.")
    entry_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--entry-ttl", "--entry-cache"), live=True)
    ] = Field(600.0, description="How long a name that was found is believed.")
    list_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--list-ttl", "--dir-entry-cache"), live=True)
    ] = Field(600.0, description="How long a directory's listing is believed.")
    negative_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--negative-ttl", "--negative-entry-cache"), live=True)
    ] = Field(60.0, description="How long the absence of a name is believed.")
    stale_if_error: Annotated[float, DURATION, Flag("TIME", live=True)] = Field(
        math.inf,
        description="How long beyond these times names, attributes and listings are still shown "
        "while the origin does not answer; 0 is not at all.",
    )
    manifest: Annotated[str | None, FILE_OR_URL, Flag("FILE|URL", shown_default="none")] = Field(
        None,
        description="Show only the files that this list names, with the sizes and versions that it "
        "gives, and send no LIST; see cachefs manifest --help.",
    )


class SharedSection(Section):
    """The cache tier that nodes share."""

    group = Group.SHARED

    shared: Annotated[str, SHARED, Flag("MEMBERS|off", live=True)] = Field(
        OFF,
        description="The memcached servers that nodes use as a tier together: "
        "HOST:PORT[,HOST:PORT...], dns:NAME:PORT, or a file with one HOST:PORT a line.",
    )
    shared_size: Annotated[int, size(), Flag("SIZE", live=True)] = Field(
        0,
        description="What all of them hold together, if that is less than the data: then only a "
        "share of the blocks is kept there; 0 for enough.",
    )
    shared_secret_file: Annotated[
        Path | None, OPTIONAL_PATH, Flag("FILE", shown_default="none")
    ] = Field(
        None,
        description="File with a secret of these nodes: blocks that were stored without it are "
        "not used.",
    )

    shared_timeout: Annotated[float, DURATION, Flag("TIME")] = Field(
        0.02,
        description="How long a reader waits for one of them at most, before it asks the origin.",
    )

    @field_validator("shared_timeout")
    @classmethod
    def _check_shared_timeout(cls, timeout_s: float) -> float:
        if not 0.001 <= timeout_s <= 86_400:
            raise ValueError("it is at least 1ms and at most 1d")
        return timeout_s


class ReadingSection(Section):
    """Buffers, and what is fetched before it is read."""

    group = Group.READING

    buffer_size: Annotated[int, size(8 << 20), Flag("SIZE")] = Field(
        300 << 20,
        description="Most memory for data on its way from the origin; a quarter of the control "
        "group's memory limit, if that is less, but at least 8 MiB.",
    )
    readahead: Annotated[
        int, size(0), Flag("SIZE", names=("--readahead", "--max-readahead"), live=True)
    ] = Field(64 << 20, description="Most to read ahead of one sequential reader; 0 is off.")
    prefetch: Annotated[Literal["off", "order", "siblings"], CHOICE, Flag(live=True)] = Field(
        "order",
        description="Which files are fetched before they are read: with order, the next ones of a "
        "directory whose files are read in name order; with siblings, also other small files of "
        "directories whose files are read in any order, for jobs that read most files of a tree.",
    )


class AccessSection(Section):
    """Owners, permissions, and limits of users."""

    group = Group.ACCESS

    uid: Annotated[
        int | None,
        count(0, 2**32 - 2),
        Flag("ID", shown_default="the origin's, else the mounting user"),
    ] = Field(None, description="Owner of all files, whatever the origin says.")
    gid: Annotated[
        int | None,
        count(0, 2**32 - 2),
        Flag("ID", shown_default="the origin's, else the mounting user's group"),
    ] = Field(None, description="Group of all files, whatever the origin says.")
    squash: Annotated[str | None, TEXT, Flag("UID:GID", shown_default="off")] = Field(
        None, description="Short for --uid UID --gid GID: one owner for all users."
    )
    file_mode: Annotated[
        int | None, MODE, Flag("OCTAL", shown_default="the origin's, else 644")
    ] = Field(
        None, description="Permission bits of files. Write bits alone make no mount writable."
    )
    dir_mode: Annotated[int | None, MODE, Flag("OCTAL", shown_default="the origin's, else 755")] = (
        Field(None, description="Permission bits of directories.")
    )
    allow_other: Annotated[
        bool,
        SWITCH,
        Flag(names=("--allow-other/--no-allow-other",), shown_default="allowed for root"),
    ] = Field(
        default_factory=lambda: os.geteuid() == 0, description="Let other users into the mount."
    )
    limit_uid: Annotated[
        dict[int, int],
        LIMITS,
        Flag("UID=SIZE", live=True, shown_default="no limits", multiple=True),
    ] = Field(
        {},
        description="Most bytes per second for the readers of a user, cached or not; may be given "
        "several times.",
    )
    nonempty: Annotated[bool, SWITCH, Flag()] = Field(
        False, description="Mount over a directory that has entries; they are hidden meanwhile."
    )
    read_only: Annotated[
        bool, SWITCH, Flag(names=("--read-only/--rw",), shown_default="read-only")
    ] = Field(True, description="With --rw, files can be written.")
    spool_size: Annotated[int, size(), Flag("SIZE", shown_default="20GiB")] = Field(
        20 << 30,
        description="Most bytes of a writable mount that wait to be sent to the origin.",
    )
    publish_interval: Annotated[float, DURATION, Flag("TIME")] = Field(
        60.0,
        description="How often a file that stays open in a writable mount, such as a log, is sent "
        "to the origin at most.",
    )
    rename_limit: Annotated[int, count(0, 10**9), Flag("N")] = Field(
        100_000,
        description="Most objects that the rename of one directory may copy, in an object store.",
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


class ProcessSection(Section):
    """The processes of the mount, their log and their metrics."""

    group = Group.PROCESS

    data_path: Annotated[Literal["auto", "relay", "python"], CHOICE, Flag()] = Field(
        "auto",
        description="Who answers the kernel: relay, compiled code that serves what is cached and "
        "outlives the daemon; or python, the daemon alone. auto is relay where that is possible; "
        "cachefs status shows why it is not.",
    )
    keeper: Annotated[Path | None, OPTIONAL_PATH, Flag("SOCKET", shown_default="none")] = Field(
        None,
        description="Socket of a keeper (cachefs keeper): SIGTERM and kills then leave the mount "
        "to the next cachefs mount of the same mountpoint, and its readers only wait. Takes the "
        "relay; before Linux 6.9 a kill still ends the mount.",
    )
    foreground: Annotated[bool, SWITCH, Flag(names=("-f", "--foreground"))] = Field(
        False, description="Stay in the foreground and log to the terminal."
    )
    log_file: Annotated[
        Path | None,
        OPTIONAL_PATH,
        Flag("FILE", shown_default="/var/log/cachefs/... for root, else ~/.cache/cachefs/log/..."),
    ] = Field(None, description="Where the daemon logs.")
    metrics: Annotated[str, ADDRESS, Flag("HOST:PORT|off")] = Field(
        "127.0.0.1:9567",
        description="Where Prometheus finds /metrics, and others /healthz and /readyz; when the "
        "default is taken by another mount, a free port, which cachefs status shows.",
    )
    log_format: Annotated[Literal["text", "json"], CHOICE, Flag()] = Field(
        "text", description="How the daemon logs; json is one object a line."
    )
    log_max_size: Annotated[int, size(64 << 10, or_zero=True), Flag("SIZE")] = Field(
        64 << 20,
        description="Rename the log file to FILE.1 at this size, and keep three older ones; 0 is "
        "never, for where logrotate does it.",
    )
    debug: Annotated[bool, SWITCH, Flag(live=True)] = Field(
        False,
        description="Log what the origin is asked for and why, too, and tracebacks of errors.",
    )
