"""Rows of a namespace that are not what they were (format/inode_record.py, namespace/).

An input is steps of a table's number, a key, and a value: lengths of one byte each.
"""

from itertools import islice

import trio

from cachefs.errors import CachefsError
from cachefs.format.inode_record import TABLES
from cachefs.namespace.transfer import known_pieces
from tests.fuzz.targets._namespace import look_at_all, running_tree


async def _open(data: bytes) -> None:
    async with running_tree() as tree:
        await look_at_all(tree)
        at = 0
        while at + 3 <= len(data):
            table, key_length, value_length = data[at : at + 3]
            at += 3
            key = data[at : at + key_length]
            value = data[at + key_length : at + key_length + value_length]
            at += key_length + value_length
            if key:
                tree.db.put(TABLES[table % len(TABLES)], key[:300], value)
        await look_at_all(tree)
        try:
            await tree.restart()
        except CachefsError:  # of another format, or source
            return
        await look_at_all(tree)
        for _ in islice(known_pieces(tree.db.snapshot()), 100):
            pass


def fuzz(data: bytes) -> None:
    trio.run(_open, data)
