"""The kernel keeps whole directories and files behind the relay, where it sends no OPEN and no
OPENDIR: what it shows is as new as if it asked each time."""

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.mount.harness import MIB, Site, eventually
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

RELAY = ("--data-path", "relay")
TTL_S = 2
TTL_NAMES = ("--attr-ttl", "--entry-ttl", "--list-ttl", "--negative-ttl")
SHORT = [word for name in TTL_NAMES for word in (name, f"{TTL_S}s")]
LONG = [word for name in TTL_NAMES for word in (name, "1h")]
SEEN_S = 10 * TTL_S
"""By then a change is seen, on a busy machine too."""
KILLED = "was killed by SIGKILL"

Shown = dict[str, tuple[int, bytes]]
"""Names to sizes and contents."""


def shown(directory: Path) -> Shown:
    """What a reader finds who looks at everything in a directory."""
    with os.scandir(directory) as entries:
        files = {entry.name: Path(entry.path) for entry in entries if entry.is_file()}
    return {name: (path.stat().st_size, path.read_bytes()) for name, path in files.items()}


def wait_until_seen(directory: Path, expected: Shown) -> None:
    """Nobody looks before the TTL ends. From then on `directory` shows what is expected."""

    def is_seen() -> bool:
        with contextlib.suppress(FileNotFoundError):  # a name ended before its directory
            return shown(directory) == expected
        return False

    time.sleep(TTL_S)
    eventually(is_seen, SEEN_S)
    assert shown(directory) == expected


def replace(path: Path, content: bytes) -> None:
    """As an object store does it: the old content or the new, never a mix."""
    new = path.with_name(".new")
    new.write_bytes(content)
    new.rename(path)


class Messages:
    """What the kernel sends."""

    def __init__(self, site: Site, log: Path) -> None:
        self._site = site
        self._log = log

    def of(self, act: Callable[[], object]) -> Counter[str]:
        """By operation, while `act` runs."""
        self._log.unlink(missing_ok=True)
        self._site.cli("set", self._site.mountpoint, f"access-log={self._log}")
        act()
        self._site.cli("set", self._site.mountpoint, "access-log=off")
        lines = self._log.read_text().splitlines()
        return Counter(line.split()[2] for line in lines)

    def least_of(self, act: Callable[[], object], may_send: Sequence[str] = ()) -> Counter[str]:
        """Repeat `act` while it sends more than `may_send`: the kernel may drop any page at any
        time, and some machines run DAMON, which drops pages that nobody has used for a minute.
        Return the messages of the run that sent the fewest others."""
        allowed = Counter(may_send)
        least = self.of(act)
        for _ in range(9):
            if least <= allowed:
                break
            least = min(least, self.of(act), key=lambda sent: (sent - allowed).total())
        return least


@pytest.fixture
def messages(site: Site, tmp_path: Path) -> Messages:
    return Messages(site, tmp_path / "access.log")


def kill_daemon(site: Site) -> None:
    """SIGKILL, and wait until another serves."""
    site.expected_trouble = (KILLED,)
    pid = site.status()["pid"]
    os.kill(pid, signal.SIGKILL)

    def has_another() -> bool:
        with contextlib.suppress(AssertionError):  # status ends with 1 while nobody answers
            return bool(site.status()["pid"] != pid)
        return False

    eventually(has_another)


# -- what is seen, and when ----------------------------------------------------------------------


def change_everything(files: Path) -> Shown:
    """New, deleted, replaced, grown and shrunk files; what is there then."""
    replace(files / "replaced", b"B" * 100)
    replace(files / "grown", b"g" * 3000)
    replace(files / "shrunk", b"s")
    (files / "deleted").unlink()
    (files / "new").write_bytes(b"new")
    return shown(files)


@pytest.fixture
def five(site: Site) -> Site:
    """A site with files in `dir`, for `change_everything`."""
    (site.files / "dir").mkdir()
    for name in ("replaced", "grown", "shrunk", "deleted", "kept"):
        (site.files / "dir" / name).write_bytes(b"A" * 100)
    return site


def test_all_changes_are_seen_when_the_ttl_ends(five: Site) -> None:
    five.mount(*RELAY, *SHORT)
    directory = five.mountpoint / "dir"
    for _ in range(2):
        before = shown(directory)
        assert before == shown(five.files / "dir")
    inos = {name: (directory / name).stat().st_ino for name in before}
    for _ in range(3):
        expected = change_everything(five.files / "dir")
        wait_until_seen(directory, expected)
        now = {name: (directory / name).stat().st_ino for name in expected}
        assert now["kept"] == inos["kept"]
        assert all(now[name] != inos[name] for name in ("replaced", "grown", "shrunk"))
        inos = now
        (five.files / "dir/deleted").write_bytes(b"again")
        (five.files / "dir/new").unlink()
        wait_until_seen(directory, shown(five.files / "dir"))


def test_refresh_tells_the_kernel_at_once(five: Site) -> None:
    five.mount(*RELAY, *LONG)
    directory = five.mountpoint / "dir"
    before = shown(directory)
    assert not (directory / "new").exists()
    expected = change_everything(five.files / "dir")
    assert shown(directory) == before, "nobody has asked"
    five.cli("refresh", directory)
    eventually(lambda: shown(directory) == expected)
    replace(five.files / "dir/kept", b"replaced, too")
    five.cli("refresh", directory / "kept")
    eventually(lambda: (directory / "kept").read_bytes() == b"replaced, too")


def test_refresh_shows_what_others_have_found_before_the_kernel(five: Site) -> None:
    """A load lists the directory; to the refresh after it nothing is new."""
    five.mount(*RELAY, *LONG)
    directory = five.mountpoint / "dir"
    shown(directory)
    (five.files / "dir/new").write_bytes(b"new")
    five.cli("refresh", five.mountpoint / "dir")
    five.cli("refresh", five.mountpoint / "dir")
    assert "new" in os.listdir(directory)


def test_a_directory_of_10000_names(site: Site, messages: Messages) -> None:
    (site.files / "large").mkdir()
    names = [f"file-{number:05}" for number in range(10_000)]
    for name in names:
        (site.files / "large" / name).touch()
    site.mount(*RELAY, *LONG)
    directory = site.mountpoint / "large"
    assert sorted(os.listdir(directory)) == names
    assert messages.least_of(lambda: os.listdir(directory)) == {}
    assert len([entry.stat() for entry in os.scandir(directory)]) == 10_000
    (site.files / "large/file-05000x").touch()
    (site.files / "large/file-07000").unlink()
    site.cli("refresh", directory)
    names[5001:5001] = ["file-05000x"]
    names.remove("file-07000")
    assert sorted(os.listdir(directory)) == names
    assert sorted(os.listdir(directory)) == names


def test_a_warm_tree_costs_no_message(five: Site, messages: Messages) -> None:
    for number in range(20):
        (five.files / f"dir/sub{number:02}/deep").mkdir(parents=True)
        for name in "abcdefgh":
            (five.files / f"dir/sub{number:02}/deep/{name}").write_bytes(name.encode())
    five.mount(*RELAY, *LONG)

    def run(*command: object) -> str:
        done = subprocess.run([*map(str, command)], capture_output=True, check=True, text=True)
        return done.stdout

    def read_all() -> list[bytes]:
        return [path.read_bytes() for path in sorted(five.mountpoint.rglob("?"))]

    assert len(read_all()) == 160
    first = run("ls", "-lR", five.mountpoint)
    outputs: list[object] = []
    find = ("find", five.mountpoint, "-type", "f")
    assert messages.least_of(lambda: outputs.append(run(*find))) == {}
    assert all(str(output).count("\n") == 165 for output in outputs)
    assert messages.least_of(read_all) == {}
    outputs.clear()
    once_per_process = ["getxattr"] * 3  # are there labels, are there lists
    listing = ("ls", "-lR", five.mountpoint)
    sent = messages.least_of(lambda: outputs.append(run(*listing)), once_per_process)
    assert sent <= Counter(once_per_process)
    assert outputs == [first] * len(outputs)


# -- held versions -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_held_file_and_a_mapping_keep_their_version(site: Site, is_killed: bool) -> None:
    old, new = b"old!" * MIB, b"newer" * MIB
    (site.files / "file").write_bytes(old)
    site.mount(*RELAY, *SHORT)
    path = site.mountpoint / "file"
    with path.open("rb", buffering=0) as file:
        assert path.read_bytes() == old
        time.sleep(1.5)  # it is stored, and the store's index, too
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        replace(site.files / "file", new)
        eventually(lambda: path.stat().st_size == len(new))
        assert path.read_bytes() == new
        if is_killed:
            kill_daemon(site)
        assert os.fstat(file.fileno()).st_size == len(old)
        assert view[:] == old
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), len(old), 0) == old
        assert path.read_bytes() == new
        del view


# -- what the kernel keeps outlives the daemon ---------------------------------------------------


def test_what_the_kernel_keeps_stays_right_after_a_kill(five: Site, messages: Messages) -> None:
    five.mount(*RELAY, *LONG)
    directory = five.mountpoint / "dir"
    before = shown(directory)
    assert not (directory / "absent").exists()
    mtimes = {path: path.stat().st_mtime_ns for path in (five.mountpoint, directory)}
    kill_daemon(five)  # of the last second nothing is committed
    assert shown(directory) == before
    assert {path: path.stat().st_mtime_ns for path in mtimes} == mtimes
    assert messages.least_of(lambda: os.listdir(directory)) == {}
    five.cli("refresh", directory)
    assert shown(directory) == before
    assert messages.least_of(lambda: os.listdir(directory)) == {}
    expected = change_everything(five.files / "dir")
    five.cli("refresh", directory)
    eventually(lambda: shown(directory) == expected)


def test_changes_are_seen_when_the_ttl_ends_also_after_a_kill(five: Site) -> None:
    five.mount(*RELAY, *SHORT)
    directory = five.mountpoint / "dir"
    shown(directory)
    shown(directory)
    expected = change_everything(five.files / "dir")
    kill_daemon(five)
    wait_until_seen(directory, expected)


_OPENER = """
import os, sys, time
fds = [os.open(f"{sys.argv[1]}/{number}", os.O_RDONLY) for number in range(int(sys.argv[2]))]
print("open", flush=True)
sys.stdin.readline()
for number, fd in enumerate(fds):
    assert os.read(fd, 100) == b"%d" % number, number
print("right")
"""


def test_files_found_just_before_a_kill_are_read_after_it(site: Site) -> None:
    """Their inodes were given out in the last second, and committed never."""
    count = 300
    for number in range(count):
        (site.files / str(number)).write_bytes(b"%d" % number)
    site.mount(*RELAY, *LONG)
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _OPENER, site.mountpoint, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "open\n"
        kill_daemon(site)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.read() == "right\n"
    assert process.returncode == 0


def test_a_directory_that_is_being_read_while_the_daemon_is_killed(site: Site) -> None:
    """Nothing is missing for those who come after."""
    (site.files / "large").mkdir()
    names = {f"file-{number:04}" for number in range(3_000)}
    for name in names:
        (site.files / "large" / name).touch()
    site.mount(*RELAY, *LONG)
    directory = site.mountpoint / "large"
    with os.scandir(directory) as entries:
        first = next(entries).name
        kill_daemon(site)
        rest = [entry.name for entry in entries]
    assert {first, *rest} <= names
    assert set(os.listdir(directory)) == names
    assert len(os.listdir(directory)) == len(names)


# -- outages -------------------------------------------------------------------------------------


@pytest.fixture
def away(site: Site, seaweedfs: SeaweedFS) -> Iterator[tuple[str, FaultProxy]]:
    bucket = seaweedfs.make_bucket("no-open")
    with FaultProxy(seaweedfs.endpoint) as proxy:
        site.source = f"s3://{bucket}"
        site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
        site.expected_trouble = (" cachefs.origin", " cachefs.namespace")
        yield bucket, proxy


def test_an_outage_leaves_nothing_stale_in_the_kernel(
    site: Site, seaweedfs: SeaweedFS, away: tuple[str, FaultProxy]
) -> None:
    """With a TTL that is longer than the end of the outage takes: what was shown for want of an
    answer is not shown for the rest of it."""
    bucket, proxy = away
    known = {str(number) for number in range(5)}
    seaweedfs.put_many(bucket, {f"dir/{number}": b"x" for number in range(5)})

    def is_shown_within(ttl_s: int) -> bool:
        """Whether a new file is shown before the TTL that began in the outage ends."""
        ttls = [word for name in TTL_NAMES for word in (name, f"{ttl_s}s")]
        site.mount(*RELAY, *ttls)
        directory = site.mountpoint / "dir"
        assert set(os.listdir(directory)) == known
        listed = time.monotonic()
        proxy.fault(Fault.REFUSE)
        time.sleep(ttl_s + 0.5)
        assert set(os.listdir(directory)) == known
        assert set(os.listdir(directory)) == known
        proxy.clear()
        seaweedfs.put_many(bucket, {f"dir/new-{ttl_s}": b"x"})
        known.add(f"new-{ttl_s}")
        eventually(lambda: set(os.listdir(directory)) == known)
        seconds = time.monotonic() - listed
        site.umount()
        return seconds < 2 * ttl_s  # by then the next TTL would show it

    # A busy machine takes longer than a short TTL to end an outage.
    assert any(is_shown_within(ttl_s) for ttl_s in (10, 40))


def test_a_directory_that_is_gone_is_absent(five: Site) -> None:
    five.mount(*RELAY, *SHORT)
    directory = five.mountpoint / "dir"
    shown(directory)
    shown(directory)
    for path in (five.files / "dir").iterdir():
        path.unlink()
    (five.files / "dir").rmdir()

    def is_gone() -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.listdir(directory)
            return False
        return True

    time.sleep(TTL_S)
    eventually(is_gone, SEEN_S)
    eventually(lambda: os.listdir(five.mountpoint) == [], SEEN_S)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        os.listdir(directory)


def test_tar_finds_no_directory_that_has_changed(site: Site) -> None:
    """GNU tar compares the ctime of each directory before and after."""
    for number in range(4):
        (site.files / f"d{number}/s").mkdir(parents=True)
        (site.files / f"d{number}/s/file").write_text("content")
    site.mount(*RELAY, *(word for name in TTL_NAMES for word in (name, "0")))

    def times() -> dict[Path, tuple[int, int]]:
        directories = [site.mountpoint, *site.mountpoint.glob("d*"), *site.mountpoint.glob("d*/s")]
        found = {directory: directory.stat() for directory in directories}
        return {path: (info.st_ctime_ns, int(info.st_mtime)) for path, info in found.items()}

    before = times()
    for _ in range(3):
        tar = ["tar", "-cf", os.devnull, "--checkpoint=1", "--checkpoint-action=exec=sleep 0.01"]
        done = subprocess.run(
            [*tar, "-C", site.mountpoint, "."], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert times() == before
        site.cli("refresh", site.mountpoint)
        assert times() == before
    site.umount()
    site.mount(*RELAY, *SHORT)
    assert times() == before
    (site.files / "d0/s/new").write_text("content")
    new = site.mountpoint / "d0/s/new"
    eventually(lambda: new in new.parent.iterdir() and times() != before, SEEN_S)
