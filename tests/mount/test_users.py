"""Users other than root: mounting through fusermount3, and reading what another has mounted."""

import json
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mount.harness import DATA_PATH
from tests.mount.namespaces import CACHEFS, MountNamespace

USER, OTHER = pwd.getpwnam("nobody").pw_uid, 65_432


class Machine:
    """A mount namespace with /dev/fuse as udev leaves it (mode 666), an /etc/fuse.conf of its own,
    and a home that a user without rights can reach."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home = home
        self.files, self.mountpoint = home / "files", home / "mnt"
        for place in (self.files, self.mountpoint):
            place.mkdir()
        self.fuse_conf = home / "fuse.conf"
        self.fuse_conf.write_text("# user_allow_other\n")
        (self.files / "file").write_text("content")
        (self.files / "secret").write_text("own")
        (self.files / "secret").chmod(0o600)
        for place in (home, *home.rglob("*")):
            shutil.chown(place, USER, USER)
        self._namespace = MountNamespace("private")
        stack.callback(self._namespace.close)
        self.root("mknod", home / "fuse", "c", 10, 229)
        self.root("chmod", "666", home / "fuse")
        self.root("mount", "--bind", home / "fuse", "/dev/fuse")
        self.root("mount", "--bind", self.fuse_conf, "/etc/fuse.conf")
        self._stack = stack

    def root(self, *command: object, code: int = 0) -> str:
        return self._namespace.run(*command, code=code)

    def user(self, *command: object, uid: int = USER, code: int = 0) -> str:
        become = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
        home = {"HOME": str(self.home), "XDG_RUNTIME_DIR": ""}
        return self._namespace.run(*become, *command, code=code, **home)

    def mount(self, *options: object, uid: int = USER, code: int = 0) -> str:
        source = f"file://{self.files}"
        limits = ("--cache-size", "64MiB", "--free-space-ratio", "0")
        path = ("--data-path", DATA_PATH)
        command = (CACHEFS, "mount", source, self.mountpoint, *limits, *path, *options)
        said = self.user(*command, uid=uid, code=code)
        if code == 0:
            self._stack.callback(self.user, CACHEFS, "umount", self.mountpoint)
        return said


@pytest.fixture
def machine() -> Iterator[Machine]:
    home = Path(tempfile.mkdtemp(prefix="cachefs-test-"))
    try:
        home.chmod(0o755)
        with ExitStack() as stack:
            yield Machine(home, stack)
    finally:
        shutil.rmtree(home)
        for uid in (USER, OTHER):
            shutil.rmtree(f"/tmp/cachefs-{uid}", ignore_errors=True)


def can_reach(uid: int, place: Path) -> bool:
    command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "test", "-x", place]
    return subprocess.run(command, check=False).returncode == 0


@pytest.fixture(autouse=True)
def _reachable() -> None:
    if not can_reach(USER, CACHEFS):
        pytest.skip(f"{CACHEFS} can't be reached by other users")


def test_a_user_mounts_reads_and_unmounts(machine: Machine) -> None:
    machine.mount()
    assert machine.user("cat", machine.mountpoint / "file") == "content"
    assert "serving" in machine.user(CACHEFS, "status")
    assert machine.user("stat", "-c", "%u", machine.mountpoint / "file") == f"{USER}\n"
    assert "denied" in machine.root("cat", machine.mountpoint / "file", code=1)
    assert list((machine.home / ".cache/cachefs").iterdir())


def test_a_users_mount_outlives_its_daemon(machine: Machine) -> None:
    """fusermount3 passes /dev/fuse to the supervisor."""
    machine.mount("--data-path", "relay")
    assert machine.user("cat", machine.mountpoint / "file") == "content"
    daemon = json.loads(machine.user(CACHEFS, "status", "--json"))[0]["pid"]
    machine.user("kill", "-KILL", daemon)
    (machine.files / "new").write_text("more")
    assert machine.user("cat", machine.mountpoint / "new") == "more"
    assert "serves instead of" in machine.user(CACHEFS, "upgrade", machine.mountpoint)
    said = machine.user(CACHEFS, "status", machine.mountpoint)
    assert "relay, supervised by process" in said
    assert "2 restarts" in said


def test_the_kernel_reads_files_directly_for_root_only(machine: Machine) -> None:
    machine.mount("--data-path", "relay", "--passthrough", "auto")
    for _ in range(2):
        assert machine.user("cat", machine.mountpoint / "file") == "content"
    said = machine.user(CACHEFS, "status", machine.mountpoint)
    assert "PASSTHROUGH    not now: it needs root (CAP_SYS_ADMIN" in said


def test_allow_other_needs_a_line_in_fuse_conf(machine: Machine) -> None:
    said = machine.mount("--allow-other", code=1)
    assert said.startswith("cachefs: error: allow_other: ")
    assert "/etc/fuse.conf has the line user_allow_other" in said
    assert said.count("\n") == 1


def test_others_are_let_in_as_far_as_modes_allow(machine: Machine) -> None:
    machine.fuse_conf.write_text("user_allow_other\n")
    machine.mount("--allow-other")
    assert machine.user("cat", machine.mountpoint / "file", uid=OTHER) == "content"
    denied = machine.user("cat", machine.mountpoint / "secret", uid=OTHER, code=1)
    assert "Permission denied" in denied
    assert machine.user("cat", machine.mountpoint / "secret") == "own"


def test_commands_of_others_say_whose_mount_it_is(machine: Machine) -> None:
    machine.fuse_conf.write_text("user_allow_other\n")
    machine.mount("--allow-other")
    place, file = machine.mountpoint, machine.mountpoint / "file"
    for verb in ("du", "load", "pin", "unpin", "evict", "info", "refresh"):
        for path in (file, place / "missing", place):
            said = machine.user(CACHEFS, verb, path, uid=OTHER, code=1)
            assert f"{path} lies in the cachefs mount {place}, but it belongs to uid {USER}" in said
            assert "run the command as that user" in said
            assert said.count("\n") == 1
    for command in (
        ["stats"],
        ["stats", place],
        ["set", place, "hedge=on"],
        ["du", "-m", place, "x"],
    ):
        said = machine.user(CACHEFS, *command, uid=OTHER, code=1)
        assert f"{place} is a cachefs mount, but it belongs to uid {USER}" in said
    status = machine.user(CACHEFS, "status", uid=OTHER)
    assert f"{place}: it belongs to uid {USER}" in status
    assert f"it belongs to uid {USER}" in machine.root(CACHEFS, "du", file, code=1)
    assert "lies in no mount" in machine.user(CACHEFS, "du", machine.home, uid=OTHER, code=2)


def test_a_private_mount_is_known_though_others_may_not_look_into_it(machine: Machine) -> None:
    machine.mount()
    file = machine.mountpoint / "file"
    said = machine.user(CACHEFS, "du", file, uid=OTHER, code=1)
    assert f"{file} lies in the cachefs mount {machine.mountpoint}" in said


def test_a_command_with_another_runtime_directory_says_where_it_looked(machine: Machine) -> None:
    machine.mount()
    other = machine.home / "run"
    other.mkdir()
    shutil.chown(other, USER, USER)
    command = ("env", f"XDG_RUNTIME_DIR={other}", CACHEFS, "du", machine.mountpoint)
    said = machine.user(*command, code=1)
    assert f"no running daemon has a runtime file for it in {other}/cachefs" in said
    assert "another XDG_RUNTIME_DIR" in said
    assert "umount" not in said  # the mount is alive


def test_squashed_files_belong_to_one_user(machine: Machine) -> None:
    machine.fuse_conf.write_text("user_allow_other\n")
    machine.mount("--allow-other", "--squash", f"{OTHER}:{OTHER}")
    owner = machine.user("stat", "-c", "%u:%g", machine.mountpoint / "secret")
    assert owner == f"{OTHER}:{OTHER}\n"
    assert machine.user("cat", machine.mountpoint / "secret", uid=OTHER) == "own"
    assert "denied" in machine.user("cat", machine.mountpoint / "secret", code=1)


def test_a_device_that_may_not_be_opened(machine: Machine) -> None:
    machine.root("chmod", "600", "/dev/fuse")
    said = machine.mount(code=1)
    assert f"uid {USER} may not open /dev/fuse" in said
    assert said.count("\n") == 1


def test_a_user_without_a_name(machine: Machine) -> None:
    cache = machine.home / "other"
    cache.mkdir()
    shutil.chown(cache, OTHER, OTHER)
    options = ("--cache-dir", cache / "cache", "--log-file", cache / "log")
    said = machine.mount(*options, uid=OTHER, code=1)
    assert f"uid {OTHER} has no name" in said
    assert said.count("\n") == 1
