"""LMDB with batched, durable commits outside the event loop. No other package uses LMDB."""

from cachefs.db.database import Database
from cachefs.db.environment import DamagedDatabaseError
from cachefs.db.offline import (
    DatabaseBuilder,
    database_exists,
    replace_database,
)
from cachefs.db.pending_changes import ChangedRows
from cachefs.db.read_through import copy_suspect
from cachefs.db.residency import Get
from cachefs.db.snapshot import DatabaseReader, DatabaseSnapshot

__all__ = [
    "ChangedRows",
    "DamagedDatabaseError",
    "Database",
    "DatabaseBuilder",
    "DatabaseReader",
    "DatabaseSnapshot",
    "Get",
    "copy_suspect",
    "database_exists",
    "replace_database",
]
