"""Decides when to list a directory instead of asking the origin for single names of it."""

from cachefs.format.inode_record import Inode
from cachefs.namespace.directories.listings import Listings
from cachefs.namespace.inodes import InodeTable
from cachefs.origin.base import Origin

_LIST_PAGE_ENTRIES = 1_000
_HEADS_PER_LIST = 8
"""The number of HEADs after which a LIST of one page is worth its price. S3 charges 12.5 times as
much for a LIST as for a HEAD; one page answers up to 1,000 HEADs."""
_MOST_COUNTS = 100_000


class ListOrHead:
    """Counts the HEADs in each directory, and begins listings; owned by its `Namespace`."""

    def __init__(self, table: InodeTable, origin: Origin, listings: Listings) -> None:
        self._table = table
        self._origin = origin
        self._listings = listings
        self._heads_since_listing: dict[int, int] = {}

    def note_head(self, directory: Inode) -> None:
        """Note that a name is about to be asked for. List the directory if HEADs of single names
        have cost as much as a listing of it.

        The length of a new directory's listing is unknown: after 8 look-ups one page is listed,
        after 32 three more, and so on. So a reader of whole directories soon needs no HEADs, and a
        reader of a few files in huge directories pays for about one LIST more per 8 HEADs.
        """
        if self._origin.lists_by_stat:
            return
        ino = directory.ino
        if len(self._heads_since_listing) > _MOST_COUNTS:
            self._heads_since_listing.clear()
        heads = self._heads_since_listing[ino] = self._heads_since_listing.get(ino, 0) + 1
        listing = self._table.listing(ino)
        if listing is not None:
            if heads > 1 + listing.entry_count // _LIST_PAGE_ENTRIES:
                del self._heads_since_listing[ino]
                self._listings.refresh(directory)
        elif heads % _HEADS_PER_LIST == 0 and _is_power_of_four(heads // _HEADS_PER_LIST):
            self._listings.list_bounded(directory, heads // _HEADS_PER_LIST)

    def note_absent(self, directory: Inode) -> None:
        """List one page of the directory after the first absent name in it.

        To find that a name is absent costs a LIST, too. A reader often looks for several absent
        names (Python tries each suffix that a module may have), and one page is mostly the whole
        directory.
        """
        ino = directory.ino
        heads = self._heads_since_listing.get(ino, 0)
        if self._origin.lists_by_stat or heads >= _HEADS_PER_LIST:
            return
        if self._table.listing(ino) is None:
            self._heads_since_listing[ino] = _HEADS_PER_LIST
            self._listings.list_bounded(directory, 1)


def _is_power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1
