"""What the next daemon finds (`staging/replay.py`, `staging/recovery.py`)."""

import os
from pathlib import Path

import pytest

from cachefs.errors import SpoolError
from cachefs.format.paths import SpoolPaths
from cachefs.format.spool_frame import HEADER_BYTES, encode_record, frame_at, seed_of
from cachefs.format.spool_identity import decode_identity
from cachefs.format.spool_record import Sealed
from cachefs.staging import recovery as recovery_module
from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.types import Posix
from tests.staging.harness import (
    SOURCE,
    FullDisk,
    a_spool,
    content_of,
    crashed,
    meta_of,
    open_spool,
)

BASE = bytes(range(200)) * 50


def seed_at(root: Path) -> int:
    return seed_of(decode_identity((root / "spool/spool.json").read_bytes(), "").uuid)


def journal_of(root: Path) -> Path:
    return SpoolPaths(root / "spool").journal


def record_offsets(root: Path) -> list[int]:
    """Where each record of the journal begins, and the end."""
    data, seed = journal_of(root).read_bytes(), seed_at(root)
    offsets = [HEADER_BYTES]
    while offsets[-1] < len(data):
        offsets.append(frame_at(data, seed, offsets[-1]).end)
    return offsets


async def fill(spool: Spool) -> None:
    """A new file, a changed one with an upload, one that waits for a user, and one that ended."""
    new = spool.begin(11, "dir/new", None)
    new.write(0, b"new content")
    new.set_attributes(mtime_ns=123, posix=Posix(mode=0o600))
    new.seal()
    changed = spool.begin(12, "changed", meta_of(BASE))
    changed.write(50, b"changed")
    changed.write(500, b"again")
    await changed.truncate(9_000)
    changed.rename("renamed")
    changed.start_upload("id", "write", "renamed")
    for number in (1, 2):
        part = changed.begin_part(number, 4_000 * number - 4_000, 4_000)
        assert changed.finish_part(part, f"tag {number}")
    changed.write(10, b"x")
    other = spool.begin(13, "conflict", None)
    other.write(0, b"mine")
    other.conflict("another version")
    gone = spool.begin(14, "gone", None)
    gone.write(0, b"gone")
    gone.drop()


async def check(spool: Spool) -> None:
    new, changed = spool.file_of(11), spool.file_of(12)
    assert new is not None
    assert changed is not None
    assert await content_of(new) == b"new content"
    assert (new.path, new.mtime_ns, new.posix) == ("dir/new", 123, Posix(mode=0o600))
    assert new.is_sealed
    expected = bytearray(BASE[:9_000])
    expected[50:57] = b"changed"
    expected[500:505] = b"again"
    expected[10:11] = b"x"
    assert await content_of(changed, BASE) == expected
    assert not changed.is_sealed
    assert changed.path == "renamed"
    assert (changed.base, changed.base_bytes) == (meta_of(BASE), 9_000)
    assert changed.upload is not None
    assert (changed.upload.upload_id, changed.upload.write_id) == ("id", "write")
    assert {number: part.tag for number, part in changed.upload.parts.items()} == {2: "tag 2"}
    (other,) = [file for file in spool.files.values() if file.path == "conflict"]
    assert (other.state, other.reason) == (FileState.CONFLICT, "another version")
    assert spool.file_of(13) is None
    assert len(spool.files) == 3


async def test_everything_is_there_after_a_kill(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        await fill(spool)
        used = spool.space.used_bytes
        place = crashed(tmp_path, tmp_path / "1")
    async with a_spool(place) as spool:
        await check(spool)
        assert spool.report.ignored_bytes == 0
        assert spool.report.removed == 1
        assert abs(spool.space.used_bytes - used) < 20_000
        assert spool.begin(20, "next", None).number > max(spool.files) - 1
        generation = spool.files[2].generation
        place = crashed(place, tmp_path / "2")
    async with a_spool(place) as spool:  # what the new journal says
        assert spool.files[2].generation == generation
        next(file for file in spool.files.values() if file.path == "next").drop()
        await check(spool)


async def test_everything_is_there_after_a_clean_end(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        await fill(spool)
    async with a_spool(tmp_path) as spool:
        await check(spool)
        assert all(file.is_synced for file in spool.files.values())


async def test_the_expected_versions_are_there_after_each_start(tmp_path: Path) -> None:
    """Those of the beginning, of a renamed file, and of one that was sent and changed meanwhile."""
    async with a_spool(tmp_path) as spool:
        spool.begin(1, "new", None)
        spool.begin(2, "replaced", None, expected_version="v1")
        spool.begin(3, "part", meta_of(b"base"))
        spool.begin(4, "renamed", meta_of(b"base")).expect("v2")
        spool.begin(5, "renamed away", None, expected_version="v1").expect("")
        for ino, base in ((6, None), (7, meta_of(b"base"))):
            sent = spool.begin(ino, f"sent {ino}", base)
            sent.begin_sending()
            sent.write(0, b"more")
            assert not sent.finish(meta_of(b"sent", "v3"))
            assert sent.expected_version == "v3"
    for _ in range(2):  # the first start writes the journal anew
        async with a_spool(tmp_path) as spool:
            found = {file.ino: file.expected_version for file in spool.files.values()}
            assert found == {1: None, 2: "v1", 3: "v1", 4: "v2", 5: "", 6: "v3", 7: "v3"}


async def test_a_torn_record_ends_the_journal(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", meta_of(BASE))
        file.write(0, b"first")
        size = journal_of(tmp_path).stat().st_size
        file.write(5, b"second")
        place = crashed(tmp_path, tmp_path / "1")
    os.truncate(journal_of(place), size + 25)
    async with a_spool(place) as spool:
        assert spool.report.ignored_bytes == 25
        assert not spool.report.is_damaged
        file = spool.files[1]
        assert file.state is FileState.OPEN
        assert (await content_of(file, BASE))[:10] == b"first" + BASE[5:10]


@pytest.mark.long
@pytest.mark.expect_log("files are held")
async def test_after_a_damaged_record_nothing_is_uploaded(tmp_path: Path) -> None:
    """Any flipped byte: what was staged then is held, and what began later is not."""
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", meta_of(BASE))
        begin = journal_of(tmp_path).stat().st_size
        file.write(0, b"first")
        end = journal_of(tmp_path).stat().st_size
        spool.begin(2, "b", None).write(0, b"later")
        crashed(tmp_path, tmp_path / "origin")
    for number, at in enumerate(range(begin, end)):
        place = crashed(tmp_path / "origin", tmp_path / str(number))
        data = bytearray(journal_of(place).read_bytes())
        data[at] ^= 0x10
        journal_of(place).write_bytes(data)
        async with a_spool(place) as spool:
            assert spool.report.is_damaged
            assert spool.report.ignored_bytes > 0
            assert spool.files[1].state is FileState.HELD
            assert spool.file_of(1) is None
            assert spool.files[2].state is FileState.OPEN
            assert await content_of(spool.files[2]) == b"later"
        assert SpoolPaths(place / "spool").bad_journal.read_bytes() == data
        async with a_spool(place) as spool:
            assert not spool.report.is_damaged
            assert spool.files[1].state is FileState.HELD, "until a user decides"


@pytest.mark.expect_log("its journal is damaged")
async def test_a_flipped_byte_of_the_last_record_is_damage(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", meta_of(BASE))
        begin = journal_of(tmp_path).stat().st_size
        file.write(0, b"acknowledged")
        end = journal_of(tmp_path).stat().st_size
        crashed(tmp_path, tmp_path / "origin")
    for number, at in enumerate(range(begin, end)):
        place = crashed(tmp_path / "origin", tmp_path / str(number))
        data = bytearray(journal_of(place).read_bytes())
        data[at] ^= 1
        journal_of(place).write_bytes(data)
        async with a_spool(place) as spool:
            assert spool.files[1].state is FileState.HELD


@pytest.mark.expect_log("its journal is damaged")
@pytest.mark.parametrize("how", ["gone", "empty", "header", "other"])
async def test_a_journal_that_can_not_be_used_loses_no_bytes(tmp_path: Path, how: str) -> None:
    async with a_spool(tmp_path) as spool:
        spool.begin(1, "a", None).write(0, b"acknowledged")
    journal = journal_of(tmp_path)
    data = journal.read_bytes()
    match how:
        case "gone":
            journal.unlink()
        case "empty":
            journal.write_bytes(b"")
        case "header":
            journal.write_bytes(b"X" + data[1:])
        case "other":
            async with a_spool(tmp_path / "other") as other:
                other.begin(1, "a", None)
            journal.write_bytes(journal_of(tmp_path / "other").read_bytes())
    async with a_spool(tmp_path) as spool:
        assert spool.report.is_damaged
        file = spool.files[1]
        assert file.state is FileState.HELD
        assert await content_of(file) == b"acknowledged"
        assert file.path == ("a" if how == "header" else "")


async def test_unknown_records(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.begin(1, "a", None).write(0, b"a")
    seed, data = seed_at(tmp_path), journal_of(tmp_path).read_bytes()
    for flags in (0, 1):
        record = framed(99, flags, b"any payload", seed, len(data))
        more = encode_record(Sealed(1, 9), seed, len(data) + len(record))
        journal_of(tmp_path).write_bytes(data + record + more)
        if flags:
            with pytest.raises(SpoolError, match="newer cachefs"):
                await open_spool(tmp_path)
            assert journal_of(tmp_path).read_bytes() == data + record + more
        else:
            async with a_spool(tmp_path) as spool:
                assert spool.files[1].is_sealed
                assert not spool.report.is_damaged


def framed(kind: int, flags: int, payload: bytes, seed: int, offset: int) -> bytes:
    """A record of any kind."""
    from cachefs.format import spool_frame

    head = spool_frame._FRAME.pack(b"\xf6\x9d", kind, flags, len(payload))
    checksums = spool_frame._checksums(head, payload, seed + offset)
    return head + spool_frame._CHECKSUMS.pack(*checksums) + payload


@pytest.mark.expect_log("bytes of 1 files")
async def test_a_record_without_its_spool_file_is_reported(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.begin(1, "a", None)
        spool.begin(2, "b", None)
    (tmp_path / "spool/files/000001.staged").unlink()
    (tmp_path / "spool/files/000009.staged").write_bytes(b"no record has this")
    (tmp_path / "spool/files/README").write_bytes(b"not ours")
    async with a_spool(tmp_path) as spool:
        assert spool.report.lost == ["a"]
        assert spool.report.removed == 1
        assert list(spool.files) == [2]
    assert sorted(os.listdir(tmp_path / "spool/files")) == ["000002.staged", "README"]


async def test_a_short_spool_file_is_held(tmp_path: Path, expect_log) -> None:
    async with a_spool(tmp_path) as spool:
        spool.begin(1, "a", meta_of(BASE)).write(0, b"content")
    os.truncate(tmp_path / "spool/files/000001.staged", 3)
    expect_log("1 files are held")
    async with a_spool(tmp_path) as spool:
        assert spool.files[1].state is FileState.HELD


async def test_a_full_disk_at_the_start(tmp_path: Path, expect_log) -> None:
    async with a_spool(tmp_path) as spool:
        await fill(spool)
    disk = FullDisk()
    disk.room_bytes = 10
    expect_log("so its journal is not rewritten")
    spool = await open_spool(tmp_path, disk=disk)
    await check(spool)
    disk.room_bytes = None
    spool.begin(30, "more", None).write(0, b"more")
    await spool.close()
    async with a_spool(tmp_path) as spool:
        assert await content_of(spool.files[max(spool.files)]) == b"more"


async def test_after_a_reboot_only_what_was_closed_and_synced_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log
) -> None:
    async with a_spool(tmp_path) as spool:
        for number, path in enumerate(("synced", "closed", "open", "changed", "attributes"), 1):
            file = spool.begin(number, path, meta_of(BASE) if path == "changed" else None)
            file.write(0, path.encode())
            if path != "open":
                file.seal()
            if path != "closed":
                await file.sync()
            if path == "changed":
                file.write(1, b"more")
                file.seal()
            if path == "attributes":
                file.set_attributes(mtime_ns=5)
        place = crashed(tmp_path, tmp_path / "1")
    for file in (tmp_path / "spool/files").iterdir():
        status = file.stat()
        os.utime(place / "spool/files" / file.name, ns=(status.st_atime_ns, status.st_mtime_ns))
    monkeypatch.setattr(recovery_module, "boot_id", lambda: b"the next system.")
    expect_log("3 files are held")
    async with a_spool(place) as spool:
        states = {file.path: file.state.name for file in spool.files.values()}
        assert states == {
            "synced": "OPEN",
            "closed": "HELD",
            "open": "HELD",
            "changed": "HELD",
            "attributes": "OPEN",
        }
        assert "not closed" in spool.files[3].reason


async def test_a_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    async with a_spool(tmp_path):
        with pytest.raises(SpoolError, match=f"in use by another cachefs .pid {os.getpid()}"):
            await open_spool(tmp_path)
    with pytest.raises(SpoolError, match="a spool of its own"):
        await Spool.open(tmp_path / "spool", "s3://other", 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(SpoolError, match="other files"):
        await Spool.open(tmp_path / "other", SOURCE, 1)
    with pytest.raises(SpoolError, match="not a directory"):
        await Spool.open(tmp_path / "other/file", SOURCE, 1)
    (tmp_path / "spool/spool.json").write_text('{"format": 2}')
    with pytest.raises(SpoolError, match="format"):
        await open_spool(tmp_path)
