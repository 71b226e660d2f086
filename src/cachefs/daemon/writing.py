"""The objects of a writable mount: its spool, and what changes files and names."""

import secrets
from array import array
from dataclasses import fields

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.publisher import Publisher
from cachefs.config import MountConfig
from cachefs.control.routes.writes import Unsent
from cachefs.daemon.relayed import Relayed
from cachefs.db.database import Database
from cachefs.errors import UsageError
from cachefs.fuse.writing import Writers
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.origin.base import Origin
from cachefs.origin.writable import Guarantees, WritableOrigin
from cachefs.staging.spool import Spool
from cachefs.writes.background import BackgroundSends
from cachefs.writes.block_copies import BlockCopies
from cachefs.writes.files import WrittenFiles
from cachefs.writes.naming.names import WrittenNames
from cachefs.writes.sending.sender import Sender
from cachefs.writes.sending.timeouts import SendTimeouts
from cachefs.writes.unsent.decisions import Decisions
from cachefs.writes.unsent.flush import Flushes
from cachefs.writes.unsent.report import UnsentFiles

_GUARANTEES = b"guarantees"
"""The row of the table "meta" of the namespace: names of fields of `Guarantees`."""
_MOUNT_ID = b"mount id"
"""A row of the same table."""


def build_writers(
    config: MountConfig,
    origin: Origin,
    cache: BlockCache,
    namespace: Namespace,
    readers: Readers,
    spool: Spool,
    db: Database,
    relayed: Relayed | None,
    publisher: Publisher | None,
    is_successor: bool,
    nursery: trio.Nursery,
) -> tuple[Writers, Unsent]:
    """Return what changes files and names, and what knows the unsent files. Sends that a user asks
    for, and copies of blocks, run in `nursery`.

    `is_successor` means that the kernel may have files open since before this daemon. Raises
    `UsageError` if the source can't be written."""
    writer = origin.writer
    if writer is None:
        raise UsageError(f"{origin.url} can't be written by cachefs; leave out --rw")
    changes = OwnChanges(namespace)
    if relayed is None:  # the relay's path keeps it for read-only mounts, too
        namespace.keep_log()
    table = None if relayed is None else relayed.table
    sender = Sender(writer, SendTimeouts(config.write_timeout))
    files = WrittenFiles(
        namespace,
        changes,
        readers,
        cache,
        spool,
        sender,
        table,
        _withdraw_nothing if publisher is None else publisher.withdraw,
    )
    files.restore(is_successor)
    if table is not None:
        table.set_unsent(array("Q", files.unsent()))
    if publisher is not None:
        publisher.is_current = files.is_current
    copies = BlockCopies(cache)
    nursery.start_soon(copies.run)
    names = WrittenNames(
        namespace,
        changes,
        files,
        readers,
        copies,
        origin,
        writer,
        config.rename_limit,
        mount_id=mount_id_in(db),
    )
    background = BackgroundSends(files, config.publish_interval)
    reports = UnsentFiles(spool, files, background)
    decisions = Decisions(reports, files, namespace, cache, sender)
    unsent = Unsent(reports, decisions, Flushes(reports, files, nursery), background)
    return Writers(files, names, background, writer.acts_for_callers), unsent


def mount_id_in(db: Database) -> str:
    """Return the id of this mount, which all of its daemons have. Makes one for a new mount."""
    known = db.get("meta", _MOUNT_ID)
    if known is None:
        known = secrets.token_hex(16).encode()
        db.put("meta", _MOUNT_ID, known)
    return known.decode(errors="replace")


def keep_guarantees(db: Database, writer: WritableOrigin) -> None:
    """Note what `check_writable` has found, for later daemons of this mount."""
    known = (field.name for field in fields(Guarantees) if getattr(writer.guarantees, field.name))
    db.put("meta", _GUARANTEES, " ".join(known).encode())


def take_over_guarantees(db: Database, writer: WritableOrigin) -> None:
    """Let the writer rely on what the first daemon of this mount has found. If that is not known,
    it relies on no condition of the store, and compares versions itself."""
    noted = db.get("meta", _GUARANTEES)
    if noted is not None:
        known = noted.decode(errors="replace").split()
        writer.guarantees = Guarantees(
            **{field.name: field.name in known for field in fields(Guarantees)}
        )


def _withdraw_nothing(ino: int, block_count: int) -> None:
    """Without a relay nobody but the daemon serves blocks."""
