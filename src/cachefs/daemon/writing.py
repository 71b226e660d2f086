"""The objects of a writable mount: its spool, and what changes files and names."""

import secrets
import time
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
from cachefs.foreign_numbers import whole_number
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
_CHECK = b"write check"
"""A row of the same table: format, key, time (s since 1970), names of fields of `Guarantees`."""
_CHECK_FORMAT = "1"
_CHECK_AGE_S = 7 * 86_400
"""For so long a later mount relies on a check."""


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


async def check_writable(db: Database, writer: WritableOrigin) -> None:
    """Find out whether the source can be written, and what it guarantees, unless an earlier mount
    has found it out with the same store, options and credentials. Raises the origin's error."""
    key = await writer.check_key()
    if key is None:
        await writer.check_writable()
        return
    known = _noted_check(db.get("meta", _CHECK), key, time.time())
    if known is not None:
        writer.guarantees = known
        return
    names = _names_of(await writer.check_writable())
    db.put("meta", _CHECK, f"{_CHECK_FORMAT} {key} {int(time.time())} {names}".encode())


def _noted_check(row: bytes | None, key: str, now_s: float) -> Guarantees | None:
    """Return what an earlier mount has found. None if that is not known, was for something else, is
    too old, or is not understood."""
    words = (row or b"").decode(errors="replace").split()
    if words[:2] != [_CHECK_FORMAT, key] or len(words) < 3:
        return None
    at_s = whole_number(words[2])
    known = {field.name for field in fields(Guarantees)}
    if at_s is None or not 0 <= now_s - at_s < _CHECK_AGE_S or not known.issuperset(words[3:]):
        return None
    return Guarantees(**{name: name in words[3:] for name in known})


def _names_of(found: Guarantees) -> str:
    return " ".join(field.name for field in fields(Guarantees) if getattr(found, field.name))


def keep_guarantees(db: Database, writer: WritableOrigin) -> None:
    """Note what `check_writable` has found, for later daemons of this mount."""
    db.put("meta", _GUARANTEES, _names_of(writer.guarantees).encode())


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
