"""The table that daemon and relay share (docs/formats/relay_table.md)."""

import errno
import mmap
import os
import random
import struct
import sys
from array import array
from collections.abc import Iterator

import pytest
import xxhash

from cachefs.format.slab import checksum_of
from cachefs.fuse import relay
from cachefs.fuse.uid_limits import UidLimits

if relay.why_not() is not None:
    pytest.skip(str(relay.why_not()), allow_module_level=True)

from cachefs.fuse.relay import _relay

ENTRIES = 1 << 10
PAGE = 4096
HEADER = struct.Struct("<8sIIQQQ")
ENTRY = struct.Struct("<IIQIIIIQ")
SUMS = struct.Struct("<Q128I")
MIB = 1 << 20
FILES = 1 << 20
INO = 0x1122334455
SUM = 0xFEDCBA9876543210


@pytest.fixture
def memory() -> Iterator[int]:
    fd = _relay.create_table(ENTRIES)
    yield fd
    os.close(fd)


@pytest.fixture
def table(memory: int) -> _relay.Table:
    return _relay.Table(memory)


def test_golden_bytes(memory: int, table: _relay.Table) -> None:
    table.revive(3)
    table.withdraw(3, 512 * 9)
    table.publish(0x1122334455, 6, 3, 512 * 9, 100_000, True, SUM)
    with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as view:
        magic, format_, ways, entries, total, epoch = HEADER.unpack_from(view)
        assert (magic, format_, ways, entries) == (b"cachefsR", 3, 8, ENTRIES)
        assert total == len(view) == os.fstat(memory).st_size
        assert epoch == 2
        first = total - FILES - ENTRIES * ENTRY.size
        used = [
            fields
            for fields in struct.iter_unpack(ENTRY.format, view[first:-FILES])
            if fields[0] != 0
        ]
        assert used == [(2, 6, 0x1122334455, 3, 9, 100_000 | 1 << 31, 1, SUM)]


def test_golden_bytes_of_passthrough(memory: int, table: _relay.Table) -> None:
    with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as view:
        whole = len(view) - FILES  # the last part
        table.pass_through(True)
        table.revive(3)
        table.mark_whole(3, True)
        assert view[2704:2736] == b"\1" + bytes(31)
        assert view[whole : whole + 5] == b"\0\0\0\1\0"
        table.withdraw_file(3)
        assert view[whole + 3] == 0
        table.mark_whole(4, True)
        _relay.Table(memory)
        assert view[2704:2736] == bytes(32)
        assert view[whole : whole + 5] == bytes(5)


def test_a_table_of_the_format_before(memory: int) -> None:
    """Of a supervisor that began before an upgrade."""
    size = os.fstat(memory).st_size - FILES
    os.truncate(memory, size)
    os.pwrite(memory, HEADER.pack(b"cachefsR", 2, 8, ENTRIES, size, 2), 0)
    table = _relay.Table(memory)
    table.revive(3)
    table.publish(INO, 0, 3, 0, 1000, True, SUM)
    table.mark_whole(3, True)
    table.pass_through(True)
    assert table.find(INO, 0) == (3, 0, 1000, True)
    table.withdraw_file(3)
    assert table.find(INO, 0) is None
    counters = table.counters()
    assert (counters["opens_state"], counters["through_error"]) == (2, errno.ENOSYS)


def test_golden_bytes_of_sums(memory: int, table: _relay.Table) -> None:
    block = random.Random(1).randbytes(MIB - 5)
    checksum = checksum_of(block)
    table.verify_all(True)
    table.note_sums(checksum, block)
    with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as view:
        assert view[648:652] == b"\1\0\0\0"
        first = (
            len(view) - FILES - ENTRIES * ENTRY.size - -(-ENTRIES // 4 * SUMS.size // PAGE) * PAGE
        )
        whole, *parts = SUMS.unpack_from(view, first + checksum % (ENTRIES // 4) * SUMS.size)
    assert whole == checksum
    assert parts == [
        xxhash.xxh3_64_intdigest(block[at : at + 8192]) & 0xFFFFFFFF for at in range(0, MIB, 8192)
    ]


@pytest.mark.parametrize("size_bytes", [128 * 1024 + 1, 500_000, MIB])
def test_sums_of_parts(table: _relay.Table, size_bytes: int) -> None:
    block = random.Random(size_bytes).randbytes(size_bytes)
    checksum = checksum_of(block)
    assert not table.has_sums(checksum)
    assert not table.sums_agree(checksum, 0, block[:8192])
    table.note_sums(checksum, block)
    assert table.has_sums(checksum)
    for first in range(0, size_bytes, 8192):
        part = bytearray(block[first : first + 16_384])
        assert table.sums_agree(checksum, first, part)
        part[-1] ^= 1
        assert not table.sums_agree(checksum, first, part)
    assert not table.sums_agree(checksum, 1, block[1:8193])
    assert not table.sums_agree(checksum, MIB, b"x")
    assert not table.sums_agree(checksum + 1, 0, block[:8192])


def test_what_is_published_is_found(table: _relay.Table) -> None:
    assert table.find(7, 0) is None
    table.publish(7, 0, 1, 4096, MIB, False, SUM)
    table.publish(7, 1, 1, 4096 + MIB, 12, True, SUM)
    assert table.find(7, 0) is None  # the file is not there yet
    table.revive(1)
    assert table.find(7, 0) == (1, 4096, MIB, False)
    assert table.find(7, 1) == (1, 4096 + MIB, 12, True)
    assert table.find(7, 2) is None
    table.publish(7, 1, 1, 8192, 12, True, SUM)
    assert table.find(7, 1) == (1, 8192, 12, True)


def test_a_freed_slot_is_served_no_more(table: _relay.Table) -> None:
    table.revive(1)
    table.publish(7, 0, 1, 4096, 100, True, SUM)
    table.publish(8, 0, 1, 8192, 100, True, SUM)
    table.withdraw(1, 4096)
    assert table.find(7, 0) is None
    assert table.find(8, 0) is not None
    table.publish(9, 0, 1, 4096, 100, True, SUM)
    assert table.find(7, 0) is None
    assert table.find(9, 0) is not None


def test_a_dead_file_is_served_no_more(table: _relay.Table) -> None:
    for file in (1, 2):
        table.revive(file)
        table.publish(file, 0, file, 4096, 100, True, SUM)
    table.withdraw_file(1)
    assert table.find(1, 0) is None
    assert table.find(2, 0) is not None


def test_a_new_daemon_begins_with_nothing(memory: int, table: _relay.Table) -> None:
    table.revive(1)
    table.publish(7, 0, 1, 4096, 100, True, SUM)
    table.limit_user(table.user(1000), True)
    table.pause(True)
    again = _relay.Table(memory)
    assert again.find(7, 0) is None
    again.revive(1)
    assert again.find(7, 0) is None
    assert again.user(1000) == table.user(1000)


def test_a_full_set_loses_blocks_and_nothing_else(table: _relay.Table) -> None:
    table.revive(1)
    for ino in range(1, 4 * ENTRIES):
        table.publish(ino, 0, 1, 512 * ino, 100, True, SUM)
    found = [ino for ino in range(1, 4 * ENTRIES) if table.find(ino, 0) is not None]
    assert len(found) == ENTRIES
    assert all(table.find(ino, 0) == (1, 512 * ino, 100, True) for ino in found)


def test_users_keep_their_numbers(table: _relay.Table) -> None:
    uids = [0, 1, 1000, 1 << 15, (1 << 32) - 2]
    numbers = [table.user(uid) for uid in uids]
    assert len(set(numbers)) == len(uids)
    assert 0 not in numbers
    assert [table.user(uid) for uid in uids] == numbers
    assert {(uid, number) for number, uid, _ in table.users() if number} == set(
        zip(uids, numbers, strict=True)
    )


@pytest.mark.parametrize(
    ("block", "file", "offset", "length"),
    [
        (0, 1 << 20, 512, 1),
        (0, 1, 100, 1),
        (0, 1, 512, 0),
        (0, 1, 512, MIB + 1),
        (1 << 32, 1, 0, 1),
    ],
)
def test_nonsense_is_refused(
    table: _relay.Table, block: int, file: int, offset: int, length: int
) -> None:
    with pytest.raises(ValueError, match="no such"):
        table.publish(1, block, file, offset, length, True, SUM)


def test_what_is_no_table_is_refused(tmp_path) -> None:
    file = tmp_path / "no table"
    file.write_bytes(b"cachefsR" + bytes(PAGE))
    with file.open("r+b") as stream, pytest.raises(ValueError, match="another format"):
        _relay.Table(stream.fileno())
    for entries in (0, 7, 12, 1 << 29):
        with pytest.raises(OSError, match="Invalid"):
            _relay.create_table(entries)


def test_the_table_of_users_is_never_full_for_ever(table: _relay.Table) -> None:
    """As many uids as a container has. Who is limited stays; the others make room."""
    limited = table.user(1000)
    table.limit_user(limited, True)
    for uid in range(100_000, 100_000 + (1 << 16)):
        number = table.user(uid)
        assert number not in {0, limited}
        assert table.user(uid) == number
    assert table.user(1000) == limited
    assert len(table.users()) <= 1 << 15


def test_a_place_where_all_are_limited_is_full(table: _relay.Table) -> None:
    uids = [7 + (n << 15) for n in range(65)]
    for uid in uids[:64]:
        table.limit_user(table.user(uid), True)
    assert table.user(uids[64]) == 0
    table.limit_user(table.user(uids[3]), False)
    assert table.user(uids[64]) == table.user(uids[64]) != 0


def test_the_bytes_of_a_user_never_become_less(table: _relay.Table) -> None:
    """A daemon moves its count to the table whenever it reports, so the next one goes on there."""

    def reported(limits: UidLimits) -> dict[int | None, int]:
        return {usage.uid: usage.read_bytes for usage in limits.usage()}

    old = UidLimits({}, table)
    number = table.user(7)
    for total in (100, 200):
        old.read_bytes[number] += 100
        assert reported(old) == {None: 0, 7: total}
    new = UidLimits({}, table)
    assert reported(new) == {None: 0, 7: 200}
    new.read_bytes[number] += 50
    assert reported(new) == reported(new) == {None: 0, 7: 250}


def test_a_file_that_changes_is_served_no_more(table: _relay.Table) -> None:
    table.revive(3)
    for block in range(3):
        table.publish(INO, block, 3, 4096 * block, 100, block == 2, 7)
    table.remove(INO, 0, 2)
    assert table.find(INO, 0) is table.find(INO, 1) is None
    assert table.find(INO, 2) is not None
    table.publish(INO, 0, 3, 0, 100, False, 7)
    assert table.find(INO, 0) is not None


def test_marks_of_unsent_files(memory: int, table: _relay.Table) -> None:
    table.mark_unsent(INO, True)
    table.mark_unsent(INO, True)
    at = 656 + 2 * place_of_mark(INO)
    assert os.pread(memory, 2, at) == (2).to_bytes(2, sys.byteorder)
    table.mark_unsent(INO, False)
    assert os.pread(memory, 2, at) == (1).to_bytes(2, sys.byteorder)
    _relay.Table(memory).set_unsent(array("Q", [INO, INO, INO]))
    assert os.pread(memory, 2, at) == (3).to_bytes(2, sys.byteorder)
    _relay.Table(memory).set_unsent(array("Q"))
    assert os.pread(memory, 2048, 656) == bytes(2048)


def place_of_mark(ino: int) -> int:
    """The finaliser of splitmix64, modulo the number of counters."""
    most = (1 << 64) - 1
    ino = (ino ^ (ino >> 30)) * 0xBF58476D1CE4E5B9 & most
    ino = (ino ^ (ino >> 27)) * 0x94D049BB133111EB & most
    return (ino ^ (ino >> 31)) % 1024
