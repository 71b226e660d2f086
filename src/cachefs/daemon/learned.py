"""Keeps what an origin learns about its store, for later daemons of the same cache directory."""

from cachefs.db import Database
from cachefs.origin.base import Learned

_LEARNED = b"learned"
"""A row of the table "meta" of the namespace."""
_MOST_BYTES = 1024


def keep_learned(db: Database, learned: Learned) -> None:
    """Add what earlier daemons have noted in `db` to `learned`, and note there what it gets."""
    noted = db.get("meta", _LEARNED) or b""
    if len(noted) <= _MOST_BYTES:
        learned.words.update(noted.decode("ascii", errors="replace").split())

    def note() -> None:
        db.put("meta", _LEARNED, " ".join(sorted(learned.words)).encode())

    learned.on_change = note
