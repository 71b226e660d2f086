"""The index of a cache directory, without slabs. (A bad one: tests/cache/test_damage.py)"""

from array import array
from pathlib import Path

import pytest

from cachefs.cache.tier.index import Index
from cachefs.db import Database
from cachefs.format.index_record import BLOCKS_TABLE, SLABS_TABLE, STATE_TABLE, SlabRow
from cachefs.types import BlockKey, BlockLocation

UUID = bytes(range(16))
KEY = BlockKey(bytes(16), 3)
ROW = SlabRow(33, 3, 1, 7, 100, b"\1")


def opened(path: Path, uuid: bytes = UUID) -> Index:
    return Index.open(str(path / "index"), 1 << 26, uuid)


def test_recency_is_kept_with_its_slab(tmp_path: Path) -> None:
    ticks = array("I", [5, 0xFFFFFFFF, 0])
    index = opened(tmp_path)
    index.put_slab(4, ROW)
    index.put_recency(4, 33, ticks)
    ticks[0] = 9
    index.close()
    index = opened(tmp_path)
    assert index.recency(4, 33, 3) == array("I", [5, 0xFFFFFFFF, 0])
    assert index.recency(4, 33, 4) is None
    assert index.recency(4, 32, 3) is None
    assert index.recency(5, 33, 3) is None
    index.delete_slab(4)
    assert index.recency(4, 33, 3) is None
    index.close()


def test_an_index_from_before_there_was_recency(tmp_path: Path) -> None:
    tables = (BLOCKS_TABLE, SLABS_TABLE, STATE_TABLE)
    Database.open(str(tmp_path / "index"), tables, 1 << 26).close()
    index = opened(tmp_path)
    assert not index.replaced_bad
    assert index.recency(4, 33, 3) is None
    index.put_recency(4, 33, array("I", [1, 2, 3]))
    index.close()


@pytest.mark.expect_log("another cache directory's")
def test_the_index_of_another_directory_is_not_used(tmp_path: Path) -> None:
    index = opened(tmp_path)
    index.put(KEY, BlockLocation(1, 2, 3, 4))
    index.put_clean_mark()
    index.close()
    index = opened(tmp_path, uuid=b"x" * 16)
    assert index.replaced_bad
    assert index.locate(KEY) is None
    assert not index.take_clean_mark()
    index.close()
    index = opened(tmp_path, uuid=b"x" * 16)
    assert not index.replaced_bad
    assert index.warm() > 0
    index.close()
