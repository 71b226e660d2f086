"""The objects of a writable mount: its spool, and what changes files and names."""

import logging
from array import array

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.publisher import Publisher
from cachefs.config import MountConfig
from cachefs.control.routes.writes import Unsent
from cachefs.daemon.relayed import Relayed
from cachefs.errors import CachefsError, UsageError
from cachefs.fuse.writing import Writers
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.origin.base import Origin
from cachefs.origin.writable import WritableOrigin
from cachefs.staging.spool import Spool
from cachefs.writes.background import BackgroundSends
from cachefs.writes.block_copies import BlockCopies
from cachefs.writes.decisions import Decisions
from cachefs.writes.files import WrittenFiles
from cachefs.writes.flush import Flushes
from cachefs.writes.names import WrittenNames
from cachefs.writes.report import UnsentFiles
from cachefs.writes.sending.sender import Sender

_CHECK_AGAIN_S = 60.0

log = logging.getLogger(__name__)


def build_writers(
    config: MountConfig,
    origin: Origin,
    cache: BlockCache,
    namespace: Namespace,
    readers: Readers,
    spool: Spool,
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
        raise UsageError(f"{origin.url} can't be written by cachefs yet; leave out --rw")
    changes = OwnChanges(namespace)
    table = None if relayed is None else relayed.table
    sender = Sender(writer)
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
        namespace, changes, files, readers, copies, origin, writer, config.rename_limit
    )
    background = BackgroundSends(files, config.publish_interval)
    reports = UnsentFiles(spool, files, background)
    decisions = Decisions(reports, files, namespace, cache, sender)
    unsent = Unsent(reports, decisions, Flushes(reports, files, nursery), background)
    return Writers(files, names, background), unsent


async def check_writable_later(writer: WritableOrigin) -> None:
    """Find out which conditions the store checks, for a daemon that replaces another: readers don't
    wait for this. Until then the writer relies on none, and compares versions itself."""
    while True:
        try:
            await writer.check_writable()
            return
        except CachefsError as error:
            log.debug("can't check what the origin guarantees: %s", error)
            await trio.sleep(_CHECK_AGAIN_S)


def _withdraw_nothing(ino: int, block_count: int) -> None:
    """Without a relay nobody but the daemon serves blocks."""
