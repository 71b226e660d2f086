"""A cache whose databases are damaged at random, and a process that reads all of it.

Such a process is a fork, because LMDB may kill it. Nothing is mounted: the process asks the
namespace and the readers as `fuse/operations.py` does.
"""

import os
import random
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.daemon.crash_check import check_databases
from cachefs.daemon.tiers import open_names
from cachefs.errors import NotFoundError, ObjectChangedError
from cachefs.format.paths import TierPaths
from cachefs.namespace.namespace import ROOT_INO, Namespace, Ttls
from cachefs.namespace.reader import Readers
from tests.memory_origin import MemoryOrigin
from tests.namespace.harness import read_directory

DIRECTORIES, FILES = 4, 40
TTLS = Ttls(attr_s=1e9, entry_s=1e9, negative_s=1e9, list_s=1e9, stale_if_error_s=1e9)
"""All that the namespace has is believed, and not asked for again."""
CRASHES = (signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_MOST_S = 60
_WRONG = 9


def _contents() -> dict[str, bytes]:
    contents = {}
    for directory in range(DIRECTORIES):
        for number in range(FILES):
            rng = random.Random(directory * 1000 + number)
            size_bytes = rng.choice((10, 100, 1000, 5000)) + rng.randrange(10)
            contents[f"d{directory}/file{number:03}"] = rng.randbytes(size_bytes)
    return contents


CONTENTS = _contents()


def make_origin() -> MemoryOrigin:
    origin = MemoryOrigin()
    for path, data in CONTENTS.items():
        origin.put(path, data)
    return origin


@dataclass
class Outcome:
    """How the processes ended that have read a damaged cache, one after the other."""

    deaths: int = 0
    wrong: str = ""


class DamagedCache:
    """Copies of one cache directory, each with one of its databases damaged."""

    def __init__(self, place: Path, origin: MemoryOrigin, name: str) -> None:
        """`name` is that of the database."""
        self._origin = origin
        self._good, self._copy = place / "good", place / "copy"
        self._name = name
        assert _in_a_fork(self._good, False, origin, place / "out") == 0, (
            place / "out"
        ).read_text()
        assert _in_a_fork(self._good, False, origin, place / "out") == 0
        self._out = place / "out"

    def try_damage(self, seed: int) -> Outcome:
        """Damage a copy, and read all of it in two processes, the second after a restart."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._good, self._copy)
        _damage(self._copy / self._name / "data.mdb", random.Random(seed))
        outcome, has_crashed = Outcome(), False
        runs = 2
        while runs:
            code = _in_a_fork(self._copy, has_crashed, self._origin, self._out)
            has_crashed = -code in CRASHES
            if has_crashed:
                outcome.deaths += 1
                if outcome.deaths > 3:
                    return outcome
                continue
            runs -= 1
            if code:
                said = self._out.read_text() or "nothing"
                outcome.wrong = f"seed {seed}: ended with {code}: {said}"
                return outcome
        return outcome


def _damage(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    count = rng.randint(1, 40)
    at = rng.randrange(len(data) - count)
    kind = rng.randrange(4)
    for position in range(at, at + count):
        if kind == 0:
            data[position] = 0
        elif kind == 1:
            data[position] ^= 1 << rng.randrange(8)
        else:
            data[position] = rng.randrange(256)
    file.write_bytes(data)


def _in_a_fork(cache: Path, has_crashed: bool, origin: MemoryOrigin, out: Path) -> int:
    """Return the exit code, or the negative number of the signal."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(fd, 2)
            signal.alarm(_MOST_S)  # its default ends the process
            wrong = trio.run(_read_all, cache, has_crashed, origin)
            for line in wrong:
                print(line, file=sys.__stderr__)
            code = _WRONG if wrong else 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sys.__stderr__.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def _read_all(cache_dir: Path, has_crashed: bool, origin: MemoryOrigin) -> list[str]:
    check_databases([TierPaths(cache_dir)], has_crashed)
    tier = CacheDirectory.open(
        cache_dir, 8 << 20, origin.identity, free_space_ratio=0.0, slab_bytes=(1 << 20) + 8192
    )
    try:
        db = open_names(tier.paths.namespace)
        try:
            async with trio.open_nursery() as nursery:
                cache = BlockCache(origin, [tier])
                await nursery.start(cache.run)
                names = Namespace(db, origin, nursery, TTLS)
                names.table.purge_unnamed()
                await db.commit()
                wrong = await _differences(names, Readers(names, cache, 64 << 20))
                _rewrite(names)
                await db.commit()
                wrong += await _differences(names, Readers(names, cache, 64 << 20))
                await cache.aclose()
                nursery.cancel_scope.cancel()
            return wrong
        finally:
            db.close()
    finally:
        tier.close()


def _rewrite(names: Namespace) -> None:
    """Change a row of each name, so that LMDB writes to all of the pages."""
    now_ns = names.clock.now_ns()
    for directory in range(DIRECTORIES):
        above = names.table.dirent(ROOT_INO, b"d%d" % directory)
        if above is not None:
            names.table.touch(above.ino, now_ns)
            for number in range(FILES):
                names.table.note_checked(above.ino, b"file%03d" % number, now_ns)


async def _differences(names: Namespace, readers: Readers) -> list[str]:
    wrong = []
    for attempt in range(3):  # the kernel asks for the path anew when something is stale
        try:
            wrong = await _compare(names, readers)
        except ObjectChangedError as error:
            wrong = [f"is stale for ever: {error}"]
            continue
        if attempt == 0 or wrong:
            break
    return wrong


async def _compare(names: Namespace, readers: Readers) -> list[str]:
    wrong = []
    found: dict[str, int] = {}
    listed, _ = await read_directory(names, ROOT_INO)
    if sorted(listed) != [b"d%d" % number for number in range(DIRECTORIES)]:
        wrong.append(f"the root shows {sorted(listed)}")
    for directory in range(DIRECTORIES):
        above = await names.lookup(ROOT_INO, b"d%d" % directory)
        for number in range(0, FILES, 3):  # before a listing
            name = b"file%03d" % number
            await names.lookup(above[0].ino, name)
        entries, _ = await read_directory(names, above[0].ino)
        for name, ino in entries.items():
            stat = names.table.stat(ino, (above[0].ino, name))
            if stat is None:
                await names.find_lost(above[0].ino, name)
            elif stat[1] != len(CONTENTS.get(f"d{directory}/{name.decode('latin1')}", b"")):
                wrong.append(f"{name!r} is listed with {stat[1]} bytes")
        if sorted(entries) != [b"file%03d" % number for number in range(FILES)]:
            wrong.append(f"d{directory} shows {sorted(entries)}")
        for number in range(FILES):
            name = b"file%03d" % number
            path = f"d{directory}/{name.decode()}"
            inode, _ = await names.lookup(above[0].ino, name)
            reader = readers.get(inode.ino)
            data = reader.read_now(0, 1 << 17)
            if data is None:
                data = await readers.read(reader, 0, 1 << 17)
            if (inode.name, inode.size_bytes, bytes(data)) != (
                name,
                len(CONTENTS[path]),
                CONTENTS[path],
            ):
                wrong.append(f"{path} is {inode} with {len(data)} bytes")
            found[path] = inode.ino
        try:
            inode, _ = await names.lookup(above[0].ino, b"none")
            wrong.append(f"there is {inode}")
        except NotFoundError:
            pass
    if len(set(found.values())) != len(found):
        wrong.append("two names have one inode")
    return wrong
