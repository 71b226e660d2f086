"""Random changes through a writable mount and behind it. After each change the mount shows what the
source has, and the source has what both have done.

The model is the content of the source, by name.
`CACHEFS_STEPS=5000 pytest tests/mount/test_write_model.py` makes more steps.
"""

import contextlib
import errno
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.origin.fsspec.local_identity import acting_as, acting_as_daemon
from cachefs.types import Caller
from tests.mount.harness import kill_daemon
from tests.mount.stores import Store, local_store, s3_store
from tests.mount.test_unsent import unsent
from tests.servers import store_dials
from tests.servers.s3_server import S3Server
from tests.servers.seaweedfs import SeaweedFS
from tests.servers.store import Store as DialledStore
from tests.servers.store_dials import CEPH, GCS, MINIO, R2
from tests.sizes import IS_LONG, size

STEPS = int(os.environ.get("CACHEFS_STEPS", size(34, 1000)))
SEED = os.environ.get("CACHEFS_SEED", "1")
DIRECTORIES = ("", "a/", "a/b/", "c/")
NAMES = tuple(f"{directory}{name}" for directory in DIRECTORIES for name in "xyz")
NO_TTL = [word for kind in ("attr", "entry", "list", "negative") for word in (f"--{kind}-ttl", "0")]


PROFILES = (R2, GCS, MINIO, CEPH) if IS_LONG else (R2,)


@pytest.fixture(params=["file", "s3", *(f"store-{profile.name}" for profile in PROFILES)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            found = stack.enter_context(local_store(tmp_path))
        else:
            server: S3Server
            if request.param == "s3":
                server = request.getfixturevalue("seaweedfs")
            else:
                profile = store_dials.PROFILES[request.param.removeprefix("store-")]
                server = stack.enter_context(DialledStore(profile))
            found = stack.enter_context(s3_store(tmp_path, server, "write-model"))
        yield found


class Model:
    """The source as it must be, and the steps that change it."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self.root = store.site.mountpoint
        self.files: dict[str, bytes] = {}
        self._random = rng
        for directory in DIRECTORIES[1:]:
            (self.root / directory).mkdir()

    def steps(self) -> list[Callable[[], None]]:
        """All kinds of steps; those that occur twice are taken twice as often."""
        return [
            self.replace,
            self.replace,
            self.append,
            self.append,
            self.overwrite,
            self.overwrite,
            self.truncate,
            self.rename,
            self.rename,
            self.unlink,
            self.fsync_twice,
            self.replace_against_another,
            self.append_against_another,
            self.write_behind,
            self.write_behind,
            self.delete_behind,
            self.kill,
        ]

    # -- through the mount ----------------------------------------------------------------------

    def replace(self) -> None:
        """Write a file as a whole."""
        name, data = self._name(), self._data()
        (self.root / name).write_bytes(data)
        self.files[name] = data

    def append(self) -> None:
        """Append to a file, or make one."""
        name, data = self._name(), self._data()
        with open(self.root / name, "ab", buffering=0) as file:
            file.write(data)
        self.files[name] = self.files.get(name, b"") + data

    def overwrite(self) -> None:
        """Change a part of a file."""
        name, data = self._old_name(), self._data()
        if name is None:
            return
        before = self.files[name]
        offset = self._random.randint(0, len(before) + 10)
        with open(self.root / name, "r+b", buffering=0) as file:
            assert os.pwrite(file.fileno(), data, offset) == len(data)
        after = bytearray(before.ljust(offset + len(data), b"\0"))
        after[offset : offset + len(data)] = data
        self.files[name] = bytes(after)

    def truncate(self) -> None:
        """Change the size of a file with a descriptor, so that a close follows."""
        name = self._old_name()
        if name is None:
            return
        before = self.files[name]
        size_bytes = self._random.randint(0, len(before) + 1000)
        with open(self.root / name, "r+b", buffering=0) as file:
            file.truncate(size_bytes)
        self.files[name] = before[:size_bytes].ljust(size_bytes, b"\0")

    def rename(self) -> None:
        """Give a file another name, which may replace a file."""
        old, new = self._old_name(), self._name()
        if old is None or old == new:
            return
        (self.root / old).rename(self.root / new)
        self.files[new] = self.files.pop(old)

    def unlink(self) -> None:
        """Remove a file."""
        name = self._old_name()
        if name is not None:
            (self.root / name).unlink()
            del self.files[name]

    def fsync_twice(self) -> None:
        """Write a file in two pieces with fsync, and look at the source before the close."""
        name, first, second = self._name(), self._data(), self._data()
        with open(self.root / name, "wb", buffering=0) as file:
            for content in (first, first + second):
                os.pwrite(file.fileno(), content, 0)
                os.fsync(file.fileno())
                assert self.store.read(name) == content
        self.files[name] = first + second

    # -- against another client -------------------------------------------------------------------

    def replace_against_another(self) -> None:
        """The last close wins if a file was written as a whole."""
        name, ours = self._name(), self._data()
        with open(self.root / name, "wb", buffering=0) as file:
            file.write(ours)
            self.store.write(name, self._data())
        self.files[name] = ours

    def append_against_another(self) -> None:
        """A change of a part fails if another client has stored a version meanwhile."""
        name, theirs = self._old_name(), self._data()
        if name is None:
            return
        file = open(self.root / name, "ab", buffering=0)  # noqa: SIM115 - its close fails
        file.write(self._data())
        self.store.write(name, theirs)
        with pytest.raises(OSError, match="Stale") as raised:
            file.close()
        assert raised.value.errno == errno.ESTALE
        self.files[name] = theirs
        self._drop_conflicts()

    def _drop_conflicts(self) -> None:
        site = self.store.site
        for row in unsent(site):
            assert row["state"] == "conflict"
            site.cli("writes", "drop", row["id"], "-m", site.mountpoint, "--yes")

    def write_behind(self) -> None:
        """Another client writes a file."""
        name, data = self._name(), self._data()
        self.store.write(name, data)
        self.files[name] = data

    def delete_behind(self) -> None:
        """Another client removes a file."""
        name = self._old_name()
        if name is not None:
            self.store.delete(name)
            del self.files[name]

    def kill(self) -> None:
        """Another daemon takes over."""
        with acting_as_daemon():
            if self.store.site.status()["data_path"]["name"] == "relay":
                kill_daemon(self.store.site)

    # -- comparing ------------------------------------------------------------------------------

    def compare(self) -> None:
        """The mount and the source have the files of the model, and no others."""
        for name in NAMES:
            assert self._shown(name) == self.files.get(name), name
            assert self.store.read_if_there(name) == self.files.get(name), name

    def compare_listings(self) -> None:
        """The listings of the mount have the files of the model."""
        shown = {
            str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()
        }
        assert shown == set(self.files)

    def _shown(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.root / name).read_bytes()
        return None

    def _name(self) -> str:
        return self._random.choice(NAMES)

    def _old_name(self) -> str | None:
        return self._random.choice(sorted(self.files)) if self.files else None

    def _data(self) -> bytes:
        return self._random.randbytes(self._random.choice((1, 100, 5_000, 70_000)))

    def own_steps(self) -> list[Callable[[], None]]:
        """The steps of the only writer."""
        return [step for step in self.steps() if step.__name__ in _OWN_STEPS]


_OWN_STEPS = ("replace", "append", "overwrite", "truncate", "rename", "unlink", "kill")
USER, HOSTILE = Caller(54_321, 54_321), Caller(54_322, 54_322)


class HostileUser(threading.Thread):
    """Tries all the time to change what belongs to another user."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._stopped = threading.Event()
        self.tries = 0
        self.successes: list[str] = []

    def run(self) -> None:
        rng = random.Random(SEED)
        with acting_as(HOSTILE):
            while not self._stopped.wait(0.002):
                attack = rng.choice(self._attacks(rng.choice(NAMES)))
                self.tries += 1
                with contextlib.suppress(OSError):
                    attack()
                    self.successes.append(attack.__name__)

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _attacks(self, name: str) -> list[Callable[[], None]]:
        root, file = self._root, self._root / name

        def unlink() -> None:
            file.unlink()

        def rename() -> None:
            file.rename(root / "evil")

        def overwrite() -> None:
            os.close(os.open(file, os.O_WRONLY))

        def truncate() -> None:
            os.truncate(file, 0)

        def chmod() -> None:
            file.chmod(0o666)

        def make_directory() -> None:
            (root / "a/evil").mkdir()

        def create() -> None:
            os.close(os.open(root / "a/b/evil", os.O_CREAT | os.O_WRONLY))

        def rename_directory() -> None:
            (root / "a").rename(root / "evil")

        return [
            *(unlink, rename, overwrite, truncate),
            *(chmod, make_directory, create, rename_directory),
        ]


@pytest.mark.root
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_hostile_user_beside(kind: str, seaweedfs: SeaweedFS) -> None:
    """All is as if the writer were alone."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-test-")))
        root.chmod(0o755)
        if kind == "file":
            store = stack.enter_context(local_store(root))
        else:
            store = stack.enter_context(s3_store(root, seaweedfs, "hostile"))
        site = store.site
        site.files.chmod(0o1777)
        site.expected_trouble += ("was killed by", "stays in the spool", "stay in the spool")
        site.mount("--rw", *NO_TTL)
        site.mountpoint.chmod(0o1777)
        hostile = HostileUser(site.mountpoint)
        with acting_as(USER):
            os.umask(0o022)  # of this thread alone, until it acts as root again
            rng = random.Random(SEED)
            model = Model(store, rng)
            hostile.start()
            try:
                for _ in range(STEPS):
                    rng.choice(model.own_steps())()
                    os.umask(0o022)
                    model.compare()
            finally:
                hostile.stop()
            model.compare_listings()
        assert hostile.tries > STEPS
        assert hostile.successes == []
        assert unsent(site) == []
        site.umount()


def test_the_mount_and_the_source_agree_after_each_step(store: Store) -> None:
    site = store.site
    site.expected_trouble += ("was killed by", "stays in the spool", "stay in the spool")
    site.mount("--rw", *NO_TTL)
    rng = random.Random(SEED)
    model = Model(store, rng)
    steps: list[Callable[[], None]] = []
    for number in range(STEPS):
        if not steps:  # each kind before any comes again
            steps = model.steps()
            rng.shuffle(steps)
        step = steps.pop()
        print(number, step.__name__)
        step()
        model.compare()
        if number % 10 == 0:
            model.compare_listings()
    assert unsent(site) == []
    site.umount()
