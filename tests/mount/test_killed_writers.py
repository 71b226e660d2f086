"""Daemons and supervisors of writable mounts are killed at random moments while processes write.

What close, fsync or rename has acknowledged is at the source afterwards, and nothing else is: no
part of a file, no mix of two versions, no open upload. While the supervisor lives, processes wait
and go on.

`CACHEFS_KILLS=20 CACHEFS_CRASHES=5 pytest tests/mount/test_killed_writers.py -s` kills more often.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mount import killed_writer
from tests.mount.harness import children_of, eventually
from tests.mount.stores import Store, local_store, s3_store
from tests.servers.seaweedfs import SeaweedFS
from tests.sizes import IS_LONG, size

KILLS = int(os.environ.get("CACHEFS_KILLS", size(2, 20)))
CRASHES = int(os.environ.get("CACHEFS_CRASHES", size(1, 5)))
IS_SHORT = not IS_LONG and "CACHEFS_KILLS" not in os.environ
"""A short run does not judge what kills at certain moments rarely cause: ESTALE for a partial
change that was interrupted and not acknowledged, and an upload that was begun but not recorded."""
SEED = os.environ.get("CACHEFS_KILL_SEED", "1")
KINDS = ("rename", "rename", "append", "append", "overwrite", "overwrite", "large", "large")
PATIENCE_S = 300
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENOENT, errno.ESTALE}
"""What a process may get from a dead mount, and from the next one until it has looked whether a
write of the dead one succeeded. ENOENT: the mountpoint without the mount."""
BUSY = ("--read-timeout", "5m", "--request-timeout", "2m", "--write-timeout", "5m")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300 + 60 * (KILLS + CRASHES)),
]


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        with local_store(tmp_path) as found:
            yield found
    else:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        with s3_store(tmp_path, server, "killed-writers") as found:
            yield found


class Writers:
    """Eight processes that write, and what they have been told."""

    def __init__(self, directory: Path, logs: Path) -> None:
        logs.mkdir()
        self._logs = [logs / f"{number}-{kind}" for number, kind in enumerate(KINDS)]
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-S", "-E", killed_writer.__file__, directory),
                    *(kind, f"{kind}{number}", f"{SEED}-{number}", log),
                ],
                stdin=subprocess.PIPE,
            )
            for number, (kind, log) in enumerate(zip(KINDS, self._logs, strict=True))
        ]

    def events(self) -> list[list[Any]]:
        """All events, in order for each key."""
        found = []
        for log in self._logs:
            text = log.read_text() if log.exists() else ""
            found += [
                json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"
            ]
        return found

    def done(self) -> int:
        """How often something was acknowledged."""
        return sum(log.read_bytes().count(b'["done"') for log in self._logs if log.exists())

    def wait_for(self, more: int) -> None:
        """Until that much more has been acknowledged."""
        wanted = self.done() + more
        eventually(lambda: self.done() >= wanted or self._has_failed(), PATIENCE_S)
        assert not self._has_failed(), self.events()[-1]

    def _has_failed(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def end(self) -> None:
        """Let each finish what it does."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(PATIENCE_S) for process in self._processes] == [0] * len(KINDS)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE_S)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def possible_values(events: list[list[Any]]) -> dict[str, set[int | None]]:
    """What each key may have: the last value that was acknowledged, and those tried since."""
    possible: dict[str, set[int | None]] = defaultdict(lambda: {None})
    for event, key, value, *_ in events:
        if event == "try":
            possible[key] = possible[key] | {value}
        elif event == "done":
            possible[key] = {value}
    return possible


def check_objects(store: Store) -> int:
    """Every object is one content as a whole, at any moment. Returns how many were read."""
    checked = 0
    for name in store.names():
        base = name.rpartition("/")[2]
        data = store.read_if_there(name)
        if data is not None:  # otherwise it was renamed
            killed_writer.values_of(base, data)
            checked += 1
    return checked


def check_all(store: Store, root: Path, events: list[list[Any]]) -> Counter[str]:
    """Compare the source, and what a mount shows of it, with what was acknowledged."""
    possible = possible_values(events)
    names = [name.removeprefix("out/") for name in store.names()]
    shown = set(os.listdir(root / "out"))
    found: dict[str, int | None] = dict.fromkeys(possible)
    found_bytes = 0
    for name in names:
        data = store.read(f"out/{name}")
        found_bytes += len(data)
        values = killed_writer.values_of(name, data)
        assert set(values) <= set(possible), f"{name} was never written"
        found |= values
        if all(len(possible[key]) == 1 for key in values):  # others may be older, for a TTL
            assert (root / "out" / name).read_bytes() == data, f"the mount has another {name}"
    wrong = {
        key: (value, possible[key]) for key, value in found.items() if value not in possible[key]
    }
    assert not wrong, f"found, and what may be: {wrong}"
    absent = {key for key, values in possible.items() if values == {None}}
    assert not absent & shown, "the mount shows removed names"
    return Counter(acknowledged=sum(e[0] == "done" for e in events), files=len(names),
                   keys=len(possible), bytes=found_bytes,
                   errors=sum(e[0] == "error" for e in events))  # fmt: skip


def test_nothing_acknowledged_is_lost(store: Store, tmp_path: Path) -> None:
    site = store.site
    site.expected_trouble += (
        " cachefs.supervisor.",
        " cachefs.mounts.prepare: ",
        " cachefs.origin.resilience.prober: ",
        " cachefs.cache.tier.slab_files: ",
        "it was never closed",
        "it stays in the spool",
        *(["its bytes stay in the spool"] if IS_SHORT or CRASHES else []),
    )
    site.options = BUSY
    site.mount("--rw", "--data-path", "relay")
    (site.mountpoint / "out").mkdir()
    chance = random.Random(SEED)
    dead: list[tuple[float, float]] = []
    writers = Writers(site.mountpoint / "out", tmp_path / "logs")
    try:
        turns = ["kill"] * KILLS + ["crash"] * CRASHES
        if CRASHES > 1:
            chance.shuffle(turns)
        for turn in turns:
            writers.wait_for(chance.randrange(1, 60))
            time.sleep(chance.random() * 0.3)
            if turn == "kill":
                for pid in children_of(site.pid()):
                    os.kill(pid, signal.SIGKILL)  # also one that is about to take over
            else:
                began_s = time.monotonic()
                site.crash()
                site.mount("--rw", "--data-path", "relay")
                dead.append((began_s, time.monotonic()))
            check_objects(store)
        writers.wait_for(20)
        writers.end()
        events = writers.events()
        for _, key, number, began_s, ended_s in (event for event in events if event[0] == "error"):
            if IS_SHORT and number == errno.ESTALE:
                continue
            is_dead = any(began_s < until_s and since_s < ended_s for since_s, until_s in dead)
            assert is_dead, f"{key}: {os.strerror(number)} at {ended_s}"
            assert number in GONE, f"{key}: {os.strerror(number)} at {ended_s}"
        site.umount()
        site.mount("--rw")  # sends what it finds in the spool
        site.umount()
        site.mount()
        print(
            f"{KILLS} kills, {CRASHES} crashes: {dict(check_all(store, site.mountpoint, events))}"
        )
        assert IS_SHORT or store.uploads() == []
        site.umount()
    finally:
        writers.kill()


KILLED_AFTER_SENDING = """
from cachefs.fuse.relay import _relay  # before libfuse
import os, pathlib, signal
from cachefs.writes.sending import sender

plain = sender.Sender.send

async def send(self, file, path, *args, **kwargs):
    meta = await plain(self, file, path, *args, **kwargs)
    mark = pathlib.Path({mark!r})
    if path == "file" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return meta

sender.Sender.send = send
"""


def test_a_kill_after_a_part_of_a_file_was_stored_and_before_this_is_recorded(
    store: Store, tmp_path: Path
) -> None:
    """The next daemon recognises its predecessor's write, although the rest of the content was in a
    version that no longer exists."""
    site, mark = store.site, tmp_path / "mark"
    site.expected_trouble += (" cachefs.supervisor.",)
    (tmp_path / "sitecustomize.py").write_text(KILLED_AFTER_SENDING.format(mark=str(mark)))
    site.environment["PYTHONPATH"] = str(tmp_path)
    store.write("file", bytes(5000))
    site.mount("--rw", "--data-path", "relay")
    with open(site.mountpoint / "file", "r+b", buffering=0) as stream:
        for offset in (10, 20):
            stream.seek(offset)
            stream.write(b"changed")
            os.fsync(stream.fileno())
    assert mark.exists()
    wanted = bytes(10) + b"changed" + bytes(3) + b"changed" + bytes(5000 - 27)
    assert store.read("file") == (site.mountpoint / "file").read_bytes() == wanted
    site.umount()


KILLED_AFTER_START = """
from cachefs.fuse.relay import _relay  # before libfuse
import os, pathlib, signal
from cachefs.origin.s3.writing import writer

plain = writer.S3Writer.start_upload

async def start_upload(self, path, *args, **kwargs):
    upload = await plain(self, path, *args, **kwargs)
    mark = pathlib.Path({mark!r})
    if path == "file" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return upload

writer.S3Writer.start_upload = start_upload
"""


def test_a_kill_after_an_upload_has_begun_and_before_its_id_is_known(
    seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    """The next daemon finds it by its time, and drops it. Uploads of others stay."""
    content = killed_writer.content("file", 1, 17 * killed_writer.MIB)
    with s3_store(tmp_path, seaweedfs, "killed-at-start") as store:
        site, mark = store.site, tmp_path / "mark"
        site.expected_trouble += (" cachefs.supervisor.",)
        (tmp_path / "sitecustomize.py").write_text(KILLED_AFTER_START.format(mark=str(mark)))
        site.environment["PYTHONPATH"] = str(tmp_path)
        begin = partial(seaweedfs.client.create_multipart_upload, Bucket=store.bucket)
        begin(Key="prefix/file2")
        site.mount("--rw", "--data-path", "relay")
        (site.mountpoint / "file").write_bytes(content)
        assert mark.exists()
        assert store.read("file") == (site.mountpoint / "file").read_bytes() == content
        assert store.uploads() == ["prefix/file2"]
        site.umount()


KILLED_WITH_A_HIDDEN_FILE = """
from cachefs.fuse.relay import _relay  # before libfuse
import os, pathlib, signal
from cachefs.origin.fsspec import local_files

plain = local_files.{step}

def step(*args, **kwargs):
    mark = pathlib.Path({mark!r})
    if not {is_after} and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    result = plain(*args, **kwargs)
    if {is_after} and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return result

local_files.{step} = step
"""


@pytest.mark.parametrize(
    ("step", "is_after", "size_bytes"),
    [
        pytest.param("LocalFiles._publish", False, 20_000, id="put"),
        pytest.param("LocalFiles._publish", True, 20_000, id="put-done"),
        pytest.param("LocalFiles.start", True, 17 * killed_writer.MIB, id="start"),
        pytest.param("LocalFiles._publish", False, 17 * killed_writer.MIB, id="complete"),
        pytest.param("LocalFiles._publish", True, 17 * killed_writer.MIB, id="complete-done"),
    ],
)
def test_the_next_daemon_removes_the_hidden_file_of_a_killed_one(
    tmp_path: Path, step: str, is_after: bool, size_bytes: int
) -> None:
    content = killed_writer.content("file", 1, size_bytes)
    with local_store(tmp_path) as store:
        site, mark = store.site, tmp_path / "mark"
        site.expected_trouble += (" cachefs.supervisor.",)
        site.mount("--rw", "--data-path", "relay")
        site.umount()  # what it has tried at the source is not tried again
        code = KILLED_WITH_A_HIDDEN_FILE.format(mark=str(mark), step=step, is_after=is_after)
        (tmp_path / "sitecustomize.py").write_text(code)
        site.environment["PYTHONPATH"] = str(tmp_path)
        site.mount("--rw", "--data-path", "relay")
        (site.mountpoint / "file").write_bytes(content)
        assert mark.exists()
        assert store.read("file") == (site.mountpoint / "file").read_bytes() == content
        assert store.uploads() == []
        site.umount()


OVERTAKEN_AND_KILLED = """
from cachefs.fuse.relay import _relay  # before libfuse
import os, pathlib, signal
import trio
from cachefs.writes import background
from cachefs.writes.sending import sender

background._QUIET_S = 1e9
plain = sender.Sender.send

async def send(self, file, path, *args, **kwargs):
    meta = await plain(self, file, path, *args, **kwargs)
    mark = pathlib.Path({mark!r})
    if path == "file" and not mark.exists():
        mark.touch()
        generation = file.staged.generation
        while file.staged.generation == generation:
            await trio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return meta

sender.Sender.send = send
"""


def test_a_kill_after_a_content_was_stored_that_a_writer_has_overtaken(
    store: Store, tmp_path: Path
) -> None:
    """The next daemon finds that the origin has the older content, and bases the rest on it. Also
    what a process reads meanwhile is the present content."""
    site, mark = store.site, tmp_path / "mark"
    site.expected_trouble += (" cachefs.supervisor.", " cachefs.cache.tier.slab_files: ")
    (tmp_path / "sitecustomize.py").write_text(OVERTAKEN_AND_KILLED.format(mark=str(mark)))
    site.environment["PYTHONPATH"] = str(tmp_path)
    store.write("file", bytes(5000))
    site.mount("--rw", "--data-path", "relay")
    first, second = (os.open(site.mountpoint / "file", os.O_RDWR) for _ in range(2))
    os.pwrite(first, b"changed", 10)
    with ThreadPoolExecutor() as threads:
        closed = threads.submit(os.close, first)
        eventually(mark.exists)
        os.pwrite(second, b"changed", 20)
        assert os.pread(second, 4000, 1000) == bytes(4000)
        closed.result(PATIENCE_S)
    os.close(second)
    wanted = bytes(10) + b"changed" + bytes(3) + b"changed" + bytes(5000 - 27)
    assert store.read("file") == (site.mountpoint / "file").read_bytes() == wanted
    site.umount()


def test_reads_of_a_file_that_a_dead_daemon_has_stored(store: Store, tmp_path: Path) -> None:
    """They come from what it has stored, although nothing sends the file before, and although no
    cache has the version that was changed."""
    site, mark = store.site, tmp_path / "mark"
    site.expected_trouble += (" cachefs.supervisor.", " cachefs.cache.", "which a dead cachefs had")
    (tmp_path / "sitecustomize.py").write_text(
        KILLED_AFTER_SENDING.format(mark=str(mark)).replace(
            "os.kill(", "os.kill(os.getppid(), signal.SIGKILL), os.kill("
        )
        + "from cachefs.writes import background\nbackground._QUIET_S = 1e9\n"
    )
    site.environment["PYTHONPATH"] = str(tmp_path)
    store.write("file", bytes(5000))
    site.mount("--rw", "--data-path", "relay")
    descriptor = os.open(site.mountpoint / "file", os.O_RDWR)
    os.pwrite(descriptor, b"changed", 10)
    with pytest.raises(OSError) as raised:
        os.fsync(descriptor)
    assert raised.value.errno in GONE
    with contextlib.suppress(OSError):
        os.close(descriptor)
    eventually(lambda: not site.is_running())
    for tier in site.cache.glob("**/slabs"):
        shutil.rmtree(tier)
        tier.mkdir()
    site.mount("--rw", "--data-path", "relay")
    wanted = bytes(10) + b"changed" + bytes(5000 - 17)
    assert (site.mountpoint / "file").read_bytes() == wanted == store.read("file")
    assert site.cli("writes", site.mountpoint).stdout == "nothing is unsent\n"
    site.umount()
