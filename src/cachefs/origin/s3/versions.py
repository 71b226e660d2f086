"""How the versions of a store's objects are told.

A version is the object's ETag. LISTs of some stores have no ETags, an empty one, or another one
than HEAD and GET (AIStore for objects of remote buckets, gateways to other kinds of storage). Then
a file would seem to be replaced whenever another kind of request shows it. So from the moment that
this is seen, a version consists of time and size, which all requests tell alike. It costs safety:
an object that is replaced within a second by one of the same size keeps its version.
"""

import logging
from dataclasses import replace

from cachefs.origin.base import Learned
from cachefs.origin.s3.listing import version_of
from cachefs.types import Entry, ObjectMeta

log = logging.getLogger(__name__)

_BY_TIME = "versions-by-time"


def version_by_time(meta: ObjectMeta) -> str:
    """Return the version that consists of time and size."""
    return version_of(None, meta.mtime_ns, meta.size_bytes)


def is_version(version: str | None, found: ObjectMeta) -> bool:
    """Whether `found`, as a HEAD or GET tells it, has this version. One that consists of time and
    size is compared with these."""
    return version in (found.version, version_by_time(found))


def is_strong(version: str) -> bool:
    """Whether `version` is an ETag that can be sent as If-Match. Weak ETags never match. A version
    that no header can hold is only compared with the version of the answer."""
    return version.startswith('"') and version.isascii() and version.isprintable()


class Versions:
    """The versions of one bucket's objects. Changes only on the loop; readable in any thread."""

    def __init__(self, endpoint: str, learned: Learned) -> None:
        self._endpoint = endpoint
        self._learned = learned

    @property
    def are_by_time(self) -> bool:
        """Whether versions consist of time and size."""
        return _BY_TIME in self._learned.words

    def tell_by_time(self) -> None:
        """Let versions consist of time and size from now on."""
        if not self.are_by_time:
            log.info(
                "%s does not tell the same ETags in listings and in objects, so the version of a "
                "file is its time and size",
                self._endpoint,
            )
            self._learned.note(_BY_TIME)

    def told(self, meta: ObjectMeta) -> ObjectMeta:
        """Return `meta` with the version that is told."""
        return replace(meta, version=version_by_time(meta)) if self.are_by_time else meta

    def told_in(self, entries: list[Entry]) -> list[Entry]:
        """Do the same for all entries."""
        if not self.are_by_time:
            return entries
        return [
            entry._replace(meta=self.told(entry.meta))
            if isinstance(entry.meta, ObjectMeta)
            else entry
            for entry in entries
        ]
