"""The options of a mount, except those of the cache: each is declared here, once.

A field has a check, a `Flag` (its form on the command line), a default and the text for
`cachefs mount --help`. Sizes are in bytes, times in seconds (`math.inf`: indefinite).
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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
    STORAGE_CLASS,
    SWITCH,
    TAGS,
    TEXT,
    TOKEN,
    Flag,
    Group,
    count,
    duration,
    show,
    size,
)
from cachefs.config.record import Field, Record
from cachefs.config.shared_option import SHARED
from cachefs.config.workloads import Workload

_TIMEOUT = duration(0.1, 86_400, "a timeout is at least 0.1s and at most 1d")
_SHARED_TIMEOUT = duration(0.001, 86_400, "it is at least 1ms and at most 1d")


class Section(Record):
    """The options of one group. `MountConfig` consists of all sections. Immutable."""

    group: ClassVar[Group]


class WorkloadSection(Section):
    """What the mount is for. It is checked before the options whose defaults it sets."""

    group = Group.READING

    workload: Annotated[Workload, CHOICE, Flag()] = Field(
        "training",
        description="What the mount is for. It sets the defaults of TTLs, read-ahead and other "
        "options (docs/OPTIONS.md). Options that are given win. serving is for model weights, "
        "checkpoint for jobs that write checkpoints and read them back.",
    )


class OriginSection(Section):
    """The object store, and the requests to it."""

    group = Group.ORIGIN

    endpoint: Annotated[str | None, TEXT, Flag("URL", shown_default="the provider's own")] = Field(
        None, description="The address of the object store, such as http://127.0.0.1:9000."
    )
    region: Annotated[str | None, TEXT, Flag("NAME", shown_default="from the environment")] = Field(
        None, description="The region of the bucket."
    )
    addressing: Annotated[Literal["auto", "path", "virtual"], CHOICE, Flag()] = Field(
        "auto",
        description="Put the bucket into the path of the URL (path) or into the host name "
        "(virtual). auto chooses the usual form of the store.",
    )
    anonymous: Annotated[bool, SWITCH, Flag()] = Field(
        False, description="Send unsigned requests. Use it for public buckets."
    )
    requester_pays: Annotated[bool, SWITCH, Flag()] = Field(
        False,
        description="Agree to pay for the requests and the transfer of a bucket whose owner asks "
        "for that (requester pays).",
    )
    profile: Annotated[str | None, TEXT, Flag("NAME", shown_default="from the environment")] = (
        Field(None, description="Use this profile of the AWS credential files.")
    )
    credentials_dir: Annotated[Path | None, OPTIONAL_PATH, Flag("DIR", shown_default="none")] = (
        Field(
            None,
            description="Read the credentials from this directory, in which Kubernetes mounts a "
            "Secret. It has the files access_key_id and secret_access_key, and "
            "session_token if there is one. The mount reads the files again when they "
            "change.",
        )
    )
    ca_file: Annotated[Path | None, OPTIONAL_PATH, Flag("FILE", shown_default="the system's")] = (
        Field(
            None,
            description="A PEM file with the CAs that may sign the certificate of the store. They "
            "replace the CAs of the system.",
        )
    )
    verify_origin: Annotated[Literal["auto", "off"], CHOICE, Flag()] = Field(
        "auto",
        description="With auto, compare each file that comes in one piece with the digest that "
        "the store gives. With off, compare nothing.",
    )
    sse: Annotated[Literal["default", "AES256", "aws:kms", "aws:kms:dsse"], CHOICE, Flag()] = Field(
        "default",
        description="How the store encrypts what is written. default is what the bucket says. The "
        "policies of some buckets refuse it.",
    )
    sse_kms_key: Annotated[str | None, TOKEN, Flag("ID", shown_default="the bucket's")] = Field(
        None, description="The id or ARN of the KMS key for --sse aws:kms or aws:kms:dsse."
    )
    storage_class: Annotated[
        str | None, STORAGE_CLASS, Flag("NAME", shown_default="the store's")
    ] = Field(None, description="The storage class of what is written, such as STANDARD_IA.")
    acl: Annotated[
        Literal[
            "default",
            "private",
            "public-read",
            "public-read-write",
            "authenticated-read",
            "bucket-owner-read",
            "bucket-owner-full-control",
        ],
        CHOICE,
        Flag("NAME"),
    ] = Field(
        "default",
        description="The canned ACL of what is written, such as bucket-owner-full-control.",
    )
    tags: Annotated[str | None, TAGS, Flag("K=V&K=V", shown_default="none")] = Field(
        None,
        description="The tags of what is written, at most ten. %26 stands for & in a value.",
    )
    oss_driver: Annotated[Literal["native", "ossfs"], CHOICE, Flag()] = Field(
        "native",
        description="How to read oss://. native uses the S3 interface of OSS. ossfs uses the "
        "library ossfs.",
    )
    hdfs_driver: Annotated[Literal["native", "pyarrow"], CHOICE, Flag()] = Field(
        "native",
        description="How to read hdfs://. native uses the library hdfs-native. pyarrow uses "
        "pyarrow and the libhdfs of the site.",
    )
    follow_links: Annotated[Literal["owner", "all"], CHOICE, Flag()] = Field(
        "owner",
        description="Which symbolic links of a file:// source to follow that lead out of their own "
        "directory. owner follows those of root, of the mounting user and of the target's owner. "
        "all follows those of all users.",
    )
    max_downloads: Annotated[int, MAX_DOWNLOADS, Flag("N", live=True)] = Field(
        64, description="Send at most this many requests to the origin at one time."
    )
    download_limit: Annotated[int, RATE, Flag("SIZE", live=True)] = Field(
        0, description="Read at most this many bytes per second from the origin. 0 means no limit."
    )
    read_timeout: Annotated[float, _TIMEOUT, Flag("TIME")] = Field(
        5.0,
        description="Let a read fail when it needs the origin and the origin has sent nothing "
        "for this time.",
    )
    request_timeout: Annotated[float, _TIMEOUT, Flag("TIME")] = Field(
        2.0,
        description="Send a request again when it has had no answer for this time. Choose less "
        "than half of --read-timeout, so that there is time for the second try.",
    )
    write_timeout: Annotated[float, _TIMEOUT, Flag("TIME")] = Field(
        60.0,
        description="Let a close, or another change in a writable mount, fail when the origin "
        "has accepted nothing for this time.",
    )
    hedge: Annotated[bool, SWITCH, Flag(names=("--hedge/--no-hedge",), live=True)] = Field(
        False,
        description="Send a second request for a block when the first one takes longer than 95% "
        "of the earlier requests.",
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.sse_kms_key is not None and not self.sse.startswith("aws:kms"):
            raise ValueError("sse_kms_key needs sse aws:kms or aws:kms:dsse, which use keys of KMS")


class MetadataSection(Section):
    """Names, attributes and listings."""

    group = Group.METADATA

    attr_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--attr-ttl", "--attr-cache"), live=True)
    ] = Field(600.0, description="How long the size and the time of a file count as current.")
    entry_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--entry-ttl", "--entry-cache"), live=True)
    ] = Field(600.0, description="How long a name that was found counts as present.")
    list_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--list-ttl", "--dir-entry-cache"), live=True)
    ] = Field(600.0, description="How long the listing of a directory counts as current.")
    negative_ttl: Annotated[
        float, DURATION, Flag("TIME", names=("--negative-ttl", "--negative-entry-cache"), live=True)
    ] = Field(60.0, description="How long a name that was not found counts as absent.")
    stale_if_error: Annotated[float, DURATION, Flag("TIME", live=True)] = Field(
        math.inf,
        description="How long to show old names, attributes and listings after their TTLs have "
        "ended, while the origin does not answer. 0 means not at all.",
    )
    manifest: Annotated[str | None, FILE_OR_URL, Flag("FILE|URL", shown_default="none")] = Field(
        None,
        description="Show only the files in this list, with the sizes and versions in the list. "
        "The mount then sends no LIST. See cachefs manifest --help.",
    )


class SharedSection(Section):
    """The cache tier that nodes share."""

    group = Group.SHARED

    shared: Annotated[str, SHARED, Flag("MEMBERS|off", live=True)] = Field(
        OFF,
        description="The memcached servers that nodes use together as a cache tier. Write "
        "HOST:PORT[,HOST:PORT...], dns:NAME:PORT, or the name of a file with one "
        "HOST:PORT per line.",
    )
    shared_size: Annotated[int, size(), Flag("SIZE", live=True)] = Field(
        0,
        description="The size of all these servers together. Give it if it is less than the "
        "data. The servers then keep only a share of the blocks. 0 means that they "
        "have room for all blocks.",
    )
    shared_secret_file: Annotated[
        Path | None, OPTIONAL_PATH, Flag("FILE", shown_default="none")
    ] = Field(
        None,
        description="A file with a secret that these nodes share. The mount does not use blocks "
        "that were stored without it.",
    )

    shared_timeout: Annotated[float, _SHARED_TIMEOUT, Flag("TIME")] = Field(
        0.02,
        description="How long a reader waits at most for one of these servers. Then it asks the "
        "origin.",
    )


class ReadingSection(Section):
    """Buffers, and what is fetched before it is read."""

    group = Group.READING

    buffer_size: Annotated[int, size(8 << 20), Flag("SIZE")] = Field(
        300 << 20,
        description="Use at most this much memory for data on its way from the origin. The "
        "limit is a quarter of the control group's memory limit if that is less, "
        "but at least 8 MiB.",
    )
    readahead: Annotated[
        int, size(0), Flag("SIZE", names=("--readahead", "--max-readahead"), live=True)
    ] = Field(
        64 << 20,
        description="Read at most this far ahead of one sequential reader. 0 switches "
        "read-ahead off.",
    )
    kernel_readahead: Annotated[int, size(4 << 10), Flag("SIZE")] = Field(
        1 << 20,
        description="Let the kernel ask for this much at a time when a file is read in order, or "
        "through mmap. Less makes mmap in random order faster. Only root can change it.",
    )
    prefetch: Annotated[Literal["off", "order", "siblings"], CHOICE, Flag(live=True)] = Field(
        "order",
        description="Fetch files before they are read. order fetches the next files of a "
        "directory whose files are read in the order of their names. siblings also "
        "fetches other small files of directories whose files are read in any "
        "order. Use siblings for jobs that read most files of a tree.",
    )


class AccessSection(Section):
    """Owners, permissions, and limits of users."""

    group = Group.ACCESS

    uid: Annotated[
        int | None,
        count(0, 2**32 - 2),
        Flag("ID", shown_default="the origin's, else the mounting user"),
    ] = Field(
        None, description="The owner of all files. It replaces the owner that the origin gives."
    )
    gid: Annotated[
        int | None,
        count(0, 2**32 - 2),
        Flag("ID", shown_default="the origin's, else the mounting user's group"),
    ] = Field(
        None, description="The group of all files. It replaces the group that the origin gives."
    )
    squash: Annotated[str | None, TEXT, Flag("UID:GID", shown_default="off")] = Field(
        None,
        description="Show this owner and group for all files. It is short for --uid UID --gid GID.",
    )
    file_mode: Annotated[
        int | None, MODE, Flag("OCTAL", shown_default="the origin's, else 644")
    ] = Field(
        None,
        description="The permission bits of files. They do not make the files of a read-only "
        "mount writable.",
    )
    dir_mode: Annotated[int | None, MODE, Flag("OCTAL", shown_default="the origin's, else 755")] = (
        Field(None, description="The permission bits of directories.")
    )
    allow_other: Annotated[
        bool,
        SWITCH,
        Flag(names=("--allow-other/--no-allow-other",), shown_default="allowed for root"),
    ] = Field(
        default_factory=lambda _: os.geteuid() == 0, description="Let other users access the mount."
    )
    limit_uid: Annotated[
        dict[int, int],
        LIMITS,
        Flag("UID=SIZE", live=True, shown_default="no limits", multiple=True),
    ] = Field(
        {},
        description="Give the readers of a user at most this many bytes per second, cached or "
        "not. The option can be given several times.",
    )
    nonempty: Annotated[bool, SWITCH, Flag()] = Field(
        False, description="Mount over a directory that has entries. The mount hides them."
    )
    read_only: Annotated[
        bool, SWITCH, Flag(names=("--read-only/--rw",), shown_default="read-only")
    ] = Field(True, description="Mount read-only, or with --rw so that files can be written.")
    spool_size: Annotated[int, size(), Flag("SIZE", shown_default="20GiB")] = Field(
        20 << 30,
        description="Let at most this many bytes of a writable mount wait to be sent to the "
        "origin.",
    )
    publish_interval: Annotated[float, DURATION, Flag("TIME")] = Field(
        60.0,
        description="Send a file that stays open in a writable mount, such as a log, at most "
        "once in this time.",
    )
    rename_limit: Annotated[int, count(0, 10**9), Flag("N")] = Field(
        100_000,
        description="Let the rename of one directory copy at most this many objects in an "
        "object store.",
    )

    def _prepared(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
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
        description="What answers the kernel. relay is compiled code that serves cached data "
        "and outlives the daemon. python is the daemon alone. auto means relay "
        "where that is possible. cachefs status shows why it is not.",
    )
    passthrough: Annotated[Literal["auto", "off"], CHOICE, Flag()] = Field(
        "off",
        description="With auto, the kernel reads large files that are completely cached directly "
        "from the cache disk, as fast as local files. Each open of a small file then takes longer. "
        "It needs root and Linux 6.9. cachefs status shows whether it is possible.",
    )
    passthrough_from: Annotated[int, size(1 << 20), Flag("SIZE")] = Field(
        64 << 20,
        description="With --passthrough, store files of this size or larger as one file each in "
        "the cache, so that the kernel can read them directly.",
    )
    keeper: Annotated[Path | None, OPTIONAL_PATH, Flag("SOCKET", shown_default="none")] = Field(
        None,
        description="The socket of a keeper (cachefs keeper). SIGTERM or a kill then leaves the "
        "mount to the next cachefs mount of the same mountpoint, and its readers "
        "only wait. The option needs the relay. Before Linux 6.9 a kill still ends "
        "the mount.",
    )
    foreground: Annotated[bool, SWITCH, Flag(names=("-f", "--foreground"))] = Field(
        False, description="Stay in the foreground and log to the terminal."
    )
    log_file: Annotated[
        Path | None,
        OPTIONAL_PATH,
        Flag("FILE", shown_default="/var/log/cachefs/... for root, else ~/.cache/cachefs/log/..."),
    ] = Field(None, description="The file in which the daemon logs.")
    metrics: Annotated[str, ADDRESS, Flag("HOST:PORT|off")] = Field(
        "127.0.0.1:9567",
        description="The address of /metrics (for Prometheus), /healthz, /readyz and the "
        "console. When another mount uses the default port, the mount takes a free "
        "one. cachefs status shows it.",
    )
    log_format: Annotated[Literal["text", "json"], CHOICE, Flag()] = Field(
        "text", description="The form of the log. json writes one object per line."
    )
    log_max_size: Annotated[int, size(64 << 10, or_zero=True), Flag("SIZE")] = Field(
        64 << 20,
        description="Rename the log file to FILE.1 when it has this size, and keep three older "
        "files. 0 means never. Use 0 where logrotate does it.",
    )
    debug: Annotated[bool, SWITCH, Flag(live=True)] = Field(
        False,
        description="Also log the requests to the origin with their reasons, and tracebacks of "
        "errors.",
    )
