"""One cache directory: its access checks, its lock and its files.

Only `CacheDirectory.open` decides whether a directory may be used. It leaves a refused directory
unchanged, byte for byte. The methods that touch slab files block on the disk: worker threads call
them. They raise `OSError` and change no state but that of the file."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cachefs.cache_dir.disk import NO_SPACE, Disk
from cachefs.cache_dir.open_slabs import close_slab
from cachefs.cache_dir.probe import probe_read_flags
from cachefs.cache_dir.slabs import SlabSet
from cachefs.errors import CacheDirError
from cachefs.format.paths import (
    OWN_NAMES,
    SLABS_NAME,
    SPOOL_NAME,
    TierPaths,
    slab_id_of,
    slab_id_of_table,
)
from cachefs.format.slab import (
    HEADER_BYTES,
    HUGE_SLAB_BYTES,
    MAX_SLAB_BYTES,
    MIN_SLAB_BYTES,
    NO_MASK,
    OBJECT_CLASS,
    OBJECT_FORMAT,
    SLOT_ENTRY,
    EntryMask,
    SlabHeader,
    SlabLayout,
    WholeObject,
    decode_header,
    encode_header,
    slab_layout,
    table_offset,
)
from cachefs.format.tier_identity import (
    MOST_BYTES,
    TierIdentity,
    decode_identity,
    encode_identity,
)
from cachefs.mounts import mountpoint_of
from cachefs.trusted_path import check_tree, open_directory, open_own_file, read_own_file
from cachefs.types import BLOCK_BYTES, Medium

log = logging.getLogger(__name__)

_MANY_SLABS = 1 << 16
_CHECKED_LATER = frozenset({SLABS_NAME, SPOOL_NAME})
"""Directories whose files are checked when they are opened: there may be 100,000."""
_PROBE = bytes(range(256)) * 16


class Watermarks(NamedTuple):
    """When the charged bytes exceed `high_bytes`, the evictor evicts down to `low_bytes`."""

    high_bytes: int
    low_bytes: int


class OpenedSlab(NamedTuple):
    """A slab file that a worker thread has opened.

    `header` is None if it is not a valid header of this slab. `is_blank` says that none was ever
    written: the daemon was killed while it created the file. Header and slot table are in the file
    `table_fd`, which is `fd` unless the slab holds a whole object.
    """

    fd: int
    header: SlabHeader | None
    table_fd: int
    is_blank: bool = False

    @property
    def whole(self) -> WholeObject | None:
        """The object that the slab holds, if it is a slab for one object."""
        return None if self.header is None else self.header.whole

    def close(self) -> None:
        """Close the files."""
        _close_all({self.fd, self.table_fd})

    @property
    def mask(self) -> EntryMask:
        """See `SlabHeader.mask`; `NO_MASK` without a header."""
        return NO_MASK if self.header is None else self.header.mask


def slab_bytes_for(quota_bytes: int) -> int:
    """Return the slab size for a new tier of `quota_bytes`.

    The slots take about quota/512: a power of two between 2 and 64 MiB. Header and slot table come
    on top, so that slots of full blocks fit exactly. Above 4 TiB slabs are larger, so that there
    are never more than about 100,000: 1 GiB for 100 TiB.
    """
    wanted = max(MIN_SLAB_BYTES, min(MAX_SLAB_BYTES, quota_bytes // 512))
    wanted = max(wanted, min(HUGE_SLAB_BYTES, quota_bytes // _MANY_SLABS))
    slots_bytes = 1 << (wanted.bit_length() - 1)
    table_bytes = slots_bytes // BLOCK_BYTES * SLOT_ENTRY.size
    return slots_bytes + HEADER_BYTES + -(-table_bytes // HEADER_BYTES) * HEADER_BYTES


class CacheDirectory:
    """An open, locked cache directory. `CacheDirectory.open` makes it; it owns locks and slab
    descriptors."""

    def __init__(
        self,
        paths: TierPaths,
        identity: TierIdentity,
        lock_fds: tuple[int, ...],
        quota_bytes: int,
        ratios: tuple[float, float, float, float],
        medium: Medium,
        disk: Disk,
    ) -> None:
        self.paths = paths
        self.medium = medium
        self.disk = disk
        self.identity = identity
        self._ratios = ratios
        self.free_space_ratio = ratios[2]
        self.pin_ratio = ratios[3]
        """Share of the capacity (`SlabSet.capacity_bytes`) that users may pin."""
        self.slabs = SlabSet(identity.slab_bytes, 1)
        self.resize(quota_bytes)
        self.read_flags = probe_read_flags(paths.probe)
        """Flags for `preadv` on the event loop; None if the loop may never read here."""
        self._lock_fds = lock_fds

    def resize(self, quota_bytes: int) -> None:
        """Change the quota and the watermarks. The evictor then deletes slabs above the quota."""
        self.quota_bytes = quota_bytes
        self.slabs.max_slabs = max(1, quota_bytes // self.identity.slab_bytes)
        capacity = self.slabs.capacity_bytes
        high, low, *_ = self._ratios
        self.watermarks = Watermarks(int(capacity * high), int(capacity * low))

    @property
    def pin_limit_bytes(self) -> int:
        """How much users may pin, in charged bytes."""
        return int(self.slabs.capacity_bytes * self.pin_ratio)

    @classmethod
    def open(
        cls,
        path: str | Path,
        quota_bytes: int,
        source_identity: str,
        high: float = 0.97,
        low: float = 0.92,
        free_space_ratio: float = 0.1,
        pin_ratio: float = 0.8,
        medium: Medium = Medium.SSD,
        disk: Disk | None = None,
        slab_bytes: int | None = None,
    ) -> "CacheDirectory":
        """Open or create a cache directory for the blocks of one source, and lock it.

        `slab_bytes` applies to a new directory; its default is `slab_bytes_for(quota_bytes)`.

        Raises `CacheDirError`, and leaves the directory unchanged, if it is not writable, belongs
        to another user or another source, lies where other users can replace it, is in use, has a
        newer format, or contains other files, links, or files of other users. If other users could
        write to it, they can't any more.
        """
        paths = TierPaths(Path(path))
        try:
            _inspect(paths, source_identity)
            os.close(open_directory(paths.root, make=True))
            lock_fds = _lock(paths)
        except OSError as error:
            raise CacheDirError(f"cache directory {path}: {error.strerror}") from error
        try:
            # Repeat under the lock: another daemon may have created a cache here meanwhile.
            identity = _inspect(paths, source_identity)
            _close_to_others(paths)
            if identity is None:
                slab_bytes = slab_bytes or slab_bytes_for(quota_bytes)
                identity = TierIdentity(uuid.uuid4().bytes, slab_bytes, source_identity)
                _create(paths, identity)
            paths.slabs.mkdir(mode=0o700, exist_ok=True)  # a user may have removed it
            ratios = (high, low, free_space_ratio, pin_ratio)
            return cls(paths, identity, lock_fds, quota_bytes, ratios, medium, disk or Disk())
        except OSError as error:
            _close_all(lock_fds)
            raise CacheDirError(f"cache directory {path}: {error.strerror}") from error
        except BaseException:
            _close_all(lock_fds)
            raise

    def close(self) -> None:
        """Close the slab files and unlock the directory."""
        for slab in self.slabs.by_id.values():
            close_slab(slab)
        _close_all(self._lock_fds)
        self._lock_fds = ()

    def files_on_disk(self) -> tuple[set[int], set[int]]:
        """Return the ids of the slabs that have a file, and of those that have a table file, from
        the names: opens no file."""
        slab_ids, of_tables = set(), set()
        for name in os.listdir(self.paths.slabs):
            if (slab_id := slab_id_of(name)) is not None:
                slab_ids.add(slab_id)
            elif (slab_id := slab_id_of_table(name)) is not None:
                of_tables.add(slab_id)
        return slab_ids, of_tables

    def has_free_space(self, more_bytes: int = 0) -> bool:
        """Whether the file system keeps `free_space_ratio` free after taking `more_bytes`."""
        free, total = self.disk.free_and_total_bytes(self.paths.slabs)
        return free - more_bytes >= self.free_space_ratio * total

    def fits_below_low(self, more_bytes: int) -> bool:
        """Whether the used space stays below the low watermark with `more_bytes` more."""
        return self.slabs.used_charge_bytes + more_bytes <= self.watermarks.low_bytes

    def create_slab(self, slab_id: int, class_index: int) -> OpenedSlab:
        """Create a slab file with all of its space allocated."""
        path = self.paths.slab(slab_id)
        fd = self.disk.create(path, self.identity.slab_bytes)
        try:
            return OpenedSlab(fd, self.format_slab(fd, slab_id, class_index), fd)
        except OSError:
            os.close(fd)
            self.disk.unlink(path)
            raise

    def create_object_slab(self, slab_id: int, whole: WholeObject) -> OpenedSlab:
        """Create the files of a slab for one object, with all of their space allocated.

        The table comes first: a file with the bytes of an object is never taken for another slab.
        """
        header = SlabHeader(
            slab_id, OBJECT_CLASS, whole.size_bytes, self.identity.uuid, OBJECT_FORMAT, whole
        )
        table_fd = self.disk.create(self.paths.table(slab_id), whole.layout.table_bytes)
        try:
            self.disk.write(table_fd, encode_header(header), 0)
            fd = self.disk.create_large(
                self.paths.slab(slab_id), whole.size_bytes, self.medium is not Medium.MEM
            )
        except OSError:
            os.close(table_fd)
            self.disk.unlink(self.paths.table(slab_id))
            raise
        return OpenedSlab(fd, header, table_fd)

    def format_slab(self, fd: int, slab_id: int, class_index: int) -> SlabHeader:
        """Write an empty slot table, then the header for a class, which is returned.

        The order matters: after a crash between the two writes, the file has the old header and an
        empty table, and blocks that the index still has are in their old slots.
        """
        layout = slab_layout(class_index, self.identity.slab_bytes)
        self.disk.allocate(fd, self.identity.slab_bytes)  # a power cut may have left less
        self.disk.write(fd, bytes(layout.data_offset - HEADER_BYTES), HEADER_BYTES)
        slab_bytes, tier_uuid = self.identity.slab_bytes, self.identity.uuid
        header = SlabHeader(slab_id, class_index, slab_bytes, tier_uuid)
        self.disk.write(fd, encode_header(header), 0)
        return header

    def open_slab(self, slab_id: int) -> OpenedSlab:
        """Open a slab's files and read its header."""
        fd = table_fd = self.disk.open(self.paths.slab(slab_id))
        try:
            with contextlib.suppress(FileNotFoundError):
                table_fd = self.disk.open(self.paths.table(slab_id))
            data = self.disk.read(table_fd, HEADER_BYTES, 0)
            header = decode_header(data)
            if header is not None and not self._is_mine(header, slab_id, fd, table_fd):
                header = None
            return OpenedSlab(fd, header, table_fd, not any(data))
        except BaseException:
            _close_all({fd, table_fd})
            raise

    def _is_mine(self, header: SlabHeader, slab_id: int, fd: int, table_fd: int) -> bool:
        if (header.slab_id, header.tier_uuid) != (slab_id, self.identity.uuid):
            return False
        if header.whole is None:
            return fd == table_fd and header.slab_bytes == self.identity.slab_bytes
        return fd != table_fd and os.fstat(fd).st_size == header.whole.size_bytes

    def read_table(
        self, fd: int, layout: SlabLayout, first: int = 0, stop: int | None = None
    ) -> bytes:
        """Return the rows [first, stop) of the slot table, by default all; fewer if the file is
        truncated."""
        end = layout.slot_count if stop is None else min(stop, layout.slot_count)
        return self.disk.read(fd, (end - first) * SLOT_ENTRY.size, table_offset(first))

    def probe(self) -> None:
        """Write a little data, sync it, and read it back from the disk. Raises `OSError`."""
        path = self.paths.probe
        self.disk.unlink(path)
        fd = self.disk.create(path, len(_PROBE))
        try:
            self.disk.write(fd, _PROBE, 0)
            self.disk.sync(fd)
            self.disk.forget(fd)
            if self.disk.read(fd, len(_PROBE), 0) != _PROBE:
                raise OSError(errno.EIO, "other bytes came back than were written")
        finally:
            os.close(fd)
            self.disk.unlink(path)

    def delete_slab(self, slab_id: int) -> None:
        """Delete a slab's files, if they exist; the table last (`create_object_slab`)."""
        self.disk.unlink(self.paths.slab(slab_id))
        self.disk.unlink(self.paths.table(slab_id))


def _inspect(paths: TierPaths, source_identity: str) -> TierIdentity | None:
    """Check the directory without changing anything. Raises `CacheDirError` if it can't be used.

    Returns its identity, or None if a new cache can be created there.
    """
    root = paths.root
    try:
        fd = open_directory(root)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise CacheDirError(f"cache directory {root} is not a directory") from None
    try:
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise CacheDirError(f"cache directory {root} is not writable")
        if os.fstat(fd).st_mode & stat.S_ISVTX:
            raise CacheDirError(f"{root} is shared by all users: name a directory below it")
        check_tree(fd, str(root), OWN_NAMES, _CHECKED_LATER)
    finally:
        os.close(fd)
    if paths.identity.exists():
        identity = decode_identity(read_own_file(paths.identity, MOST_BYTES), str(root))
        if identity.source != source_identity:
            raise CacheDirError(
                f"cache directory {root} belongs to the mount of {identity.source}: "
                "give every source a directory of its own with --cache-dir"
            )
        return identity
    _refuse_foreign_files(paths)
    return None


def _close_to_others(paths: TierPaths) -> None:
    """Give the directory the mode 700, and take the right to write in directories below it away
    from others. Raises `OSError`, also if one of them has put something there since `_inspect`.

    With a umask of 002 an operator makes directories for a group, and the volumes of Kubernetes are
    open to all.
    """
    fd = open_directory(paths.root)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode != 0o700:
            os.fchmod(fd, 0o700)
        below = check_tree(fd, str(paths.root), OWN_NAMES, _CHECKED_LATER, close=True)
    finally:
        os.close(fd)
    if mode & 0o022 or below:
        log.info(
            "cache directory %s: others than uid %d could write to it (mode %o), and now can't",
            paths.root,
            os.geteuid(),
            mode,
        )


def _refuse_foreign_files(paths: TierPaths) -> None:
    foreign = set(os.listdir(paths.root)) - OWN_NAMES - {"lost+found"}
    if foreign or (paths.slabs.exists() and os.listdir(paths.slabs)):
        raise CacheDirError(
            f"cache directory {paths.root} holds other files and no cachefs.json: "
            "name an empty directory"
        )


def _lock(paths: TierPaths) -> tuple[int, ...]:
    """Lock the file `lock` and the directory, and return both descriptors.

    The locks last as long as the descriptors, and so never longer than the process. The directory
    is locked too because a user may delete the file.
    """
    fd = open_own_file(paths.lock, os.O_RDWR | os.O_CREAT)
    directory_fd = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _note_pid(fd)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        _close_all((fd, directory_fd))
        place = mountpoint_of(int(owner)) if owner.isdigit() else None
        where = "" if place is None else f", which has it mounted on {place}"
        raise CacheDirError(
            f"cache directory {paths.root} is in use by another cachefs (pid {owner}){where}: "
            "use that mount, or give this one a directory of its own with --cache-dir"
        ) from None
    except OSError:
        _close_all((fd, directory_fd))
        raise
    return fd, directory_fd


def _note_pid(fd: int) -> None:
    """Write our pid into the lock file, for messages of others. On a full disk it may stay empty.

    The file is written before it is truncated: a full XFS or btrfs has no block for it after its
    own was freed.
    """
    text = f"{os.getpid()}\n".encode()
    try:
        os.ftruncate(fd, os.pwrite(fd, text, 0))
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)  # the pid of another process would mislead


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _create(paths: TierPaths, identity: TierIdentity) -> None:
    """Create a cache. The rename is the commit point: before it the directory counts as empty."""
    paths.slabs.mkdir(mode=0o700, exist_ok=True)
    paths.identity_tmp.unlink(missing_ok=True)
    fd = open_own_file(paths.identity_tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(fd, encode_identity(identity))
        os.fsync(fd)
    finally:
        os.close(fd)
    paths.identity_tmp.rename(paths.identity)
    directory_fd = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)
