"""`cachefs fluid`, as in the FUSE container of Fluid: real mounts that follow a file."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.mounts import cachefs_mounts, unmount
from tests.mount.harness import (
    CLI,
    DATA_PATH,
    PATIENCE_S,
    PATIENT,
    SHARED,
    children_of,
    crash,
    eventually,
    is_running,
)
from tests.servers.seaweedfs import SeaweedFS
from tests.servers.suspend import suspend

LATER = "the next try comes in"


class Container:
    """The files that Fluid and the kubelet give to a FUSE container, and the process in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / "runtime-mnt/thin/lab/it/thin-fuse"
        self.secrets = root / "secrets"
        self.config = root / "config/config.json"
        self.log = root / "log"
        self.memory = root / "memory"
        self.memory.mkdir()
        self.environment: dict[str, str] = {}
        self.prefix: tuple[str, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None
        self.options = {"data_path": DATA_PATH, "cache_size": "256MiB", "free_space_ratio": "0"}
        if SHARED:
            self.options["shared"] = SHARED
        for name, value in zip(PATIENT[::2], PATIENT[1::2], strict=True):
            self.options[name.removeprefix("--")] = value

    def source(self, name: str) -> str:
        """A directory with the file `who`, which has its name."""
        place = self.root / "sources" / name
        place.mkdir(parents=True)
        (place / "who").write_text(name)
        return f"file://{place}"

    def mount(self, name: str, **more: Any) -> dict[str, Any]:
        place = self.root / "sources" / name
        source = f"file://{place}" if place.exists() else self.source(name)
        return {"mountPoint": source, "name": name, **more}

    def write(self, *mounts: dict[str, Any], **more: Any) -> None:
        content = {
            "mounts": list(mounts),
            "targetPath": str(self.target),
            "runtimeOptions": self.options,
            "accessModes": ["ReadOnlyMany"],
            **more,
        }
        replace_volume(self.config.parent, {"config.json": json.dumps(content)})

    def start(self) -> None:
        environment = {"CACHEFS_CACHE_DIR": str(self.root / "cache"), **self.environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *self._fluid(), "--config", self.config, "--secrets", self.secrets],
                stderr=log,
                env=os.environ | environment,
            )

    def _fluid(self) -> list[str]:
        """`cachefs fluid`, with the credentials in a directory of the test instead of /dev/shm: a
        killed one leaves them there, and its container's /dev/shm would go with it."""
        patch = f"from cachefs.cli import fluid; fluid._memory_dir = lambda: {str(self.memory)!r}"
        return [*CLI[:-1], f"{patch}; {CLI[-1]}", "fluid"]

    def mounted(self) -> list[str]:
        """The mounts by path from the target path."""
        found = [mount.mountpoint for mount in cachefs_mounts()]
        below = [place for place in found if place.is_relative_to(self.target)]
        return sorted(str(place.relative_to(self.target)) for place in below)

    def wait_for(self, *names: str) -> None:
        """Until these are mounted and answer, and no others."""

        def answers(name: str) -> bool:
            with contextlib.suppress(OSError):
                return bool(os.listdir(self.target / name))
            return False

        assert self.process is not None
        eventually(lambda: self.mounted() == sorted(names) and all(map(answers, names)))
        assert self.process.poll() is None

    def who(self, name: str) -> str:
        return (self.target / name / "who").read_text()

    def pid_of(self, name: str) -> int:
        assert self.process is not None
        place = str(self.target / name) if name != "." else str(self.target)
        found = [p for p in children_of(self.process.pid) if command_of(p)[-1] == place]
        assert len(found) == 1
        return found[0]

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Like the end of a container that is killed: all its processes at once."""
        assert self.process is not None
        suspend(self.process.pid)
        for child in children_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                crash(child)
        self.process.kill()
        self.process.wait()

    def lines(self, part: str) -> int:
        return self.log.read_text().count(part)

    def tear_down(self) -> None:
        children: list[int] = []
        if self.process is not None and self.process.poll() is None:
            children = children_of(self.process.pid)
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        for name in reversed(self.mounted()):
            with contextlib.suppress(OSError):
                unmount(self.target / name, lazy=True)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in children:
            with contextlib.suppress(AssertionError):
                eventually(lambda child=child: not is_running(child), 30)  # type: ignore[misc]
            if is_running(child):
                os.kill(child, signal.SIGKILL)
        print(f"--- log\n{self.log.read_text() if self.log.exists() else ''}---")


def replace_volume(place: Path, files: dict[str, str]) -> None:
    """Change the files of a ConfigMap or a Secret as the kubelet does."""
    fresh = place / f"..{time.monotonic_ns()}"
    fresh.mkdir(parents=True)
    for name, text in files.items():
        (fresh / name).write_text(text)
        if not (place / name).is_symlink():
            (place / name).symlink_to(f"..data/{name}")
    (place / "..tmp").symlink_to(fresh.name)
    os.replace(place / "..tmp", place / "..data")


def command_of(pid: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return [""]


def owner_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_uid
    return None


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    container = Container(tmp_path)
    yield container
    container.tear_down()


def test_one_mount_is_ready_for_fluid_and_ends_with_sigterm(container: Container) -> None:
    container.write(container.mount("data"))
    container.start()
    container.wait_for(".")
    # What Fluid waits for: a line of the mount table with the path and the type of the profile,
    # and an answer to stat.
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [line for line in table if f"{container.target}" in line and "fuse.cachefs" in line]
    assert container.target.stat()
    assert container.who(".") == "data"
    with pytest.raises(OSError, match="Read-only"):
        (container.target / "new").write_text("")
    assert os.listdir(container.root / "cache") == ["data"]
    with (container.target / "who").open():
        assert container.end() == 0
    assert container.mounted() == []
    assert os.listdir(container.target) == []


def test_mounts_come_and_go_and_equal_ones_stay(container: Container) -> None:
    container.write(container.mount("stays"), container.mount("goes", path="/deep/goes"))
    container.start()
    container.wait_for("stays", "deep/goes")
    assert (container.who("stays"), container.who("deep/goes")) == ("stays", "goes")
    before = container.pid_of("stays")
    with (container.target / "stays/who").open() as stream:
        container.write(container.mount("comes"), container.mount("stays"))
        container.wait_for("comes", "stays")
        assert stream.read() == "stays"
    assert container.who("comes") == "comes"
    assert container.pid_of("stays") == before
    eventually(lambda: sorted(os.listdir(container.target)) == ["comes", "stays"])

    container.write(container.mount("comes"), container.mount("stays", options={"uid": "12"}))
    eventually(lambda: owner_of(container.target / "stays/who") == 12)
    container.wait_for("comes", "stays")
    assert container.end() == 0
    assert container.mounted() == []


def test_one_mount_becomes_several_and_one_again(container: Container) -> None:
    container.write(container.mount("a"))
    container.start()
    container.wait_for(".")
    container.write(container.mount("a"), container.mount("b"))
    container.wait_for("a", "b")
    assert container.who("a") == "a"
    container.write(container.mount("a"))
    container.wait_for(".")
    assert container.who(".") == "a"
    assert os.listdir(container.root / "sources/a") == ["who"]
    assert container.lines(LATER) == 0
    assert container.end() == 0


def test_mounts_may_come_later(container: Container) -> None:
    container.write()
    container.start()
    eventually(container.target.is_dir)
    container.write(container.mount("late"))
    container.wait_for(".")
    assert container.end() == 0


def test_a_wrong_change_keeps_the_mounts(container: Container) -> None:
    container.write(container.mount("data"))
    container.start()
    container.wait_for(".")
    before = container.pid_of(".")
    wrong = {"cache_sise": "hunter2"}
    container.write(container.mount("data", options=wrong), container.mount("more"))
    eventually(lambda: container.lines("the present mounts stay") == 1)
    replace_volume(container.config.parent, {"config.json": "{"})
    eventually(lambda: container.lines("the present mounts stay") == 2)
    assert container.pid_of(".") == before
    assert container.who(".") == "data"
    container.write(container.mount("data"))
    eventually(lambda: container.lines("has changed") == 1)
    assert container.pid_of(".") == before
    text = container.log.read_text()
    assert container.lines("the present mounts stay") == 2
    assert "unknown option 'cache_sise'" in text
    assert "hunter2" not in text
    assert container.end() == 0


def test_a_wrong_file_at_the_start_is_an_error(container: Container) -> None:
    container.write(container.mount("data", path="../../etc"))
    container.start()
    assert container.process is not None
    assert container.process.wait(PATIENCE_S) == 2
    text = container.log.read_text()
    assert text.startswith("cachefs: error: ")
    assert text.count("\n") == 1
    container.config.unlink()
    container.start()
    assert container.process.wait(PATIENCE_S) == 2
    assert container.lines("it can't be read: No such file") == 1


def test_a_killed_mount_comes_back(container: Container) -> None:
    container.write(container.mount("one"), container.mount("two"))
    container.start()
    container.wait_for("one", "two")
    before = container.pid_of("two")
    crash(container.pid_of("one"))
    eventually(lambda: container.lines(LATER) >= 1)
    container.wait_for("one", "two")
    assert container.who("one") == "one"
    assert container.pid_of("two") == before
    assert container.end() == 0


@pytest.mark.root
def test_as_process_1_it_reaps_orphans(container: Container) -> None:
    container.prefix = ("unshare", "--pid", "--fork", "--kill-child")
    container.write(container.mount("data"))
    container.start()
    container.wait_for(".")
    assert container.process is not None
    (first,) = children_of(container.process.pid)
    (served,) = children_of(first)
    os.kill(served, signal.SIGKILL)  # with a supervisor, its daemon is an orphan until it ends
    eventually(lambda: container.lines(LATER) >= 1)
    container.wait_for(".")
    eventually(lambda: len(children_of(first)) == 1)
    os.kill(first, signal.SIGTERM)
    assert container.process.wait(PATIENCE_S) == 0
    assert container.mounted() == []


def test_a_mount_that_fails_is_tried_again(container: Container) -> None:
    container.source("late")
    gone = container.root / "sources/late"
    gone.rename(gone.with_name("early"))
    container.write({"mountPoint": f"file://{gone}", "name": "late"}, container.mount("other"))
    container.start()
    container.wait_for("other")
    eventually(lambda: container.lines(f"{container.target}/late ended") >= 2)
    gone.with_name("early").rename(gone)
    container.wait_for("late", "other")
    assert container.end() == 0


def test_dead_mounts_of_a_killed_container_go(container: Container) -> None:
    container.write(container.mount("one"), container.mount("two"))
    container.start()
    container.wait_for("one", "two")
    container.kill()
    assert container.mounted() == ["one", "two"]
    container.write(container.mount("two"), container.mount("three"))
    container.start()
    container.wait_for("three", "two")
    assert container.who("two") == "two"
    assert container.end() == 0


def test_a_link_leads_nowhere(container: Container) -> None:
    outside = container.root / "outside"
    outside.mkdir()
    container.target.mkdir(parents=True)
    (container.target / "link").symlink_to(outside)
    container.write(container.mount("data", path="link/data"), container.mount("other"))
    container.start()
    container.wait_for("other")
    eventually(lambda: container.lines("is a symbolic link; remove it") >= 1)
    assert os.listdir(outside) == []
    assert container.end() == 0


def all_command_lines(container: Container) -> str:
    assert container.process is not None
    pids = [container.process.pid]
    for pid in pids:
        pids += children_of(pid)
    return "\n".join(" ".join(command_of(pid)) for pid in pids)


def test_credentials_are_files_of_a_secret(container: Container, seaweedfs: SeaweedFS) -> None:
    seaweedfs.make_bucket("fluid-secret")
    seaweedfs.put_many("fluid-secret", {"train/file": b"content", "train/later/file": b"later"})
    key, secret = seaweedfs.access_key, seaweedfs.secret_key
    replace_volume(container.secrets / "s3", {"my-id": key, "my-secret": secret})
    options = {
        "endpoint": seaweedfs.endpoint,
        "aws.accessKeyId": f"{container.secrets}/s3/my-id",
        "secret_access_key": f"{container.secrets}/s3/my-secret",
    }
    bucket = {"mountPoint": "s3://fluid-secret/train", "name": "bucket", "options": options}
    container.write(bucket, container.mount("directory"))
    container.start()
    container.wait_for("bucket", "directory")
    assert (container.target / "bucket/file").read_bytes() == b"content"
    before = container.pid_of("bucket")

    replace_volume(container.secrets / "s3", {"my-id": f"{key}\n", "my-secret": secret})
    eventually(lambda: used_key_is_read(container, "bucket", f"{key}\n"))
    options |= {"aws.accessKeyId": key, "secret_access_key": secret}  # as with storage: secret
    container.write(bucket, container.mount("directory"))
    eventually(lambda: used_key_is_read(container, "bucket", key))
    assert container.pid_of("bucket") == before
    assert (container.target / "bucket/later/file").read_bytes() == b"later"

    lines = all_command_lines(container)
    assert "fluid-secret" in lines
    assert secret not in lines + container.log.read_text()
    place = credentials_dir(container, "bucket")
    assert container.end() == 0
    assert not place.exists()


def credentials_dir(container: Container, name: str) -> Path:
    words = command_of(container.pid_of(name))
    option = "--credentials-dir="
    return next(Path(word.removeprefix(option)) for word in words if word.startswith(option))


def used_key_is_read(container: Container, name: str, key: str) -> bool:
    file = credentials_dir(container, name) / "..data/access_key_id"
    assert file.parent.parent.stat().st_mode & 0o077 == 0
    with contextlib.suppress(FileNotFoundError):  # it is being replaced
        return file.read_text() == key
    return False


def test_writes_reach_the_source_before_the_end(container: Container) -> None:
    container.write(
        container.mount("data"),
        container.mount("fixed", readOnly=True),
        accessModes=["ReadWriteMany"],
    )
    container.start()
    container.wait_for("data", "fixed")
    (container.target / "data/new").write_text("written")
    with pytest.raises(OSError, match="Read-only"):
        (container.target / "fixed/new").write_text("")
    assert container.end() == 0
    assert (container.root / "sources/data/new").read_text() == "written"
