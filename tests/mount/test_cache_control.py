"""What is cached, and steering it, as a user would: info, du, evict, pin, unpin, refresh."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.cli.mounts.path_request import PathRequest
from cachefs.control import api
from tests.mount.harness import CLI, MIB, PATIENT, Site, eventually
from tests.servers.seaweedfs import SeaweedFS

SMALL = 50_000


@pytest.fixture
def content(site: Site) -> dict[str, bytes]:
    noise = random.Random(5)
    files = {f"train/{number // 10}/{number}.bin": noise.randbytes(SMALL) for number in range(30)}
    files["large"] = noise.randbytes(3 * MIB + 17)
    files["empty"] = b""
    for name, data in files.items():
        (site.files / name).parent.mkdir(parents=True, exist_ok=True)
        (site.files / name).write_bytes(data)
    site.mount("--entry-ttl", "1h", "--attr-ttl", "1h", "--list-ttl", "1h", "--negative-ttl", "1h")
    return files


def read(site: Site, content: dict[str, bytes], prefix: str = "") -> None:
    for name, data in content.items():
        if name.startswith(prefix):
            assert (site.mountpoint / name).read_bytes() == data


def answers(site: Site, verb: str, *args: object, code: int = 0) -> list[dict[str, Any]]:
    lines = site.cli(verb, *args, "--json", code=code).stdout.splitlines()
    return [json.loads(line) for line in lines]


def answer(site: Site, verb: str, *args: object, code: int = 0) -> dict[str, Any]:
    (line,) = answers(site, verb, *args, code=code)
    return line


def cached_bytes(site: Site, path: str = "") -> int:
    found: int = answer(site, "info", site.mountpoint / path)["cached_bytes"]
    return found


def stored(site: Site, path: str, wanted_bytes: int) -> None:
    """What was read is stored behind the reader's back."""
    eventually(lambda: cached_bytes(site, path) == wanted_bytes)


# -- looking -------------------------------------------------------------------------------------


def test_info_of_a_file(site: Site, content: dict[str, bytes]) -> None:
    path = site.mountpoint / "large"
    size = len(content["large"])
    before = answer(site, "info", path)
    assert (before["kind"], before["size_bytes"], before["cached_bytes"]) == ("file", size, 0)
    assert before["inode"] == path.stat().st_ino
    assert abs(before["mtime"] - path.stat().st_mtime) < 1
    assert before["source"] == f"file://{site.files}/large"
    read(site, content, "large")
    stored(site, "large", size)
    after = answer(site, "info", path)
    assert (after["cached_blocks"], after["blocks"], after["pinned_bytes"]) == (4, 4, 0)
    assert after["version"] == before["version"]
    tier = {"medium": "SSD", "blocks": 4, "size_bytes": size, "pinned_bytes": 0}
    assert after["tiers"] == {str(site.cache): tier}
    text = site.cli("info", path).stdout
    assert text.startswith(f"{path}\n  source    file://{site.files}/large\n")
    assert f"size      3 MiB ({size} bytes)" in text
    assert "cached    3 MiB, 100 %" in text
    assert f"SSD {site.cache}: 3 MiB in 4 blocks" in text
    assert "pinned    no" in text


def test_info_of_several_paths_and_of_a_directory(site: Site, content: dict[str, bytes]) -> None:
    read(site, content, "train/1/")
    stored(site, "train/1", 10 * SMALL)
    said = site.cli("info", site.mountpoint / "train", site.mountpoint / "nothing", code=1)
    assert "1.4 MiB in 30 files, 3 directories" in said.stdout
    assert "cached    488.3 KiB, 33 %" in said.stdout
    assert said.stderr == f"cachefs: {site.mountpoint}/nothing: no such file or directory\n"
    top, empty = answers(site, "info", site.mountpoint, site.mountpoint / "empty")
    assert (top["kind"], top["files"], top["inode"]) == ("directory", 32, 1)
    assert top["size_bytes"] == sum(map(len, content.values()))
    assert (empty["size_bytes"], empty["blocks"], empty["cached_files"]) == (0, 0, 1)


def test_du(site: Site, content: dict[str, bytes]) -> None:
    read(site, content, "train/1/")
    stored(site, "train/1", 10 * SMALL)
    lines = answers(site, "du", site.mountpoint / "train")
    short = [
        (Path(x["path"]).name, x["files"], x["cached_files"], x["cached_bytes"]) for x in lines
    ]
    assert short == [
        ("0", 10, 0, 0),
        ("1", 10, 10, 10 * SMALL),
        ("2", 10, 0, 0),
        ("train", 30, 10, 10 * SMALL),
    ]
    assert [len(answers(site, "du", site.mountpoint, "-d", depth)) for depth in (0, 1, 2)] == [
        1,
        2,
        5,
    ]
    text = site.cli("du", "-s", "--bytes", site.mountpoint / "train", site.mountpoint / "large")
    head, train, large = text.stdout.splitlines()
    assert head.split() == ["cached", "of", "files", "of", "path"]
    assert train.split() == [
        str(10 * SMALL), str(30 * SMALL), "10", "30", f"{site.mountpoint}/train",
    ]  # fmt: skip
    assert large.split()[:4] == ["0", str(len(content["large"])), "0", "1"]
    assert "1.4 MiB" in site.cli("du", site.mountpoint / "train").stdout


def test_what_is_known_is_not_asked_again(site: Site, content: dict[str, bytes]) -> None:
    site.cli("du", site.mountpoint)
    lists = site.origin()["lists"]
    assert lists >= 5
    for verb in ("du", "info", "pin", "unpin", "evict"):
        site.cli(verb, site.mountpoint)
    assert site.origin()["lists"] == lists


# -- dropping ------------------------------------------------------------------------------------


def test_evict(site: Site, content: dict[str, bytes]) -> None:
    read(site, content)
    total = sum(map(len, content.values()))
    stored(site, "", total)
    said = site.cli("evict", "--dry-run", site.mountpoint / "train/2")
    assert said.stdout == "would evict 488.3 KiB in 10 blocks\n"
    assert cached_bytes(site) == total
    said = site.cli("evict", site.mountpoint / "train/2", site.mountpoint / "large")
    assert said.stdout == "evicted 3.5 MiB in 14 blocks\n"
    assert cached_bytes(site) == total - 10 * SMALL - len(content["large"])
    fetched = site.fetched()
    for name in content:  # past the kernel's pages
        fd = os.open(site.mountpoint / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    read(site, content)
    assert site.fetched() > fetched
    stored(site, "", total)


def test_evict_does_not_list(site: Site, content: dict[str, bytes]) -> None:
    read(site, content, "train/1/")
    stored_lists = site.origin()["lists"]
    eventually(lambda: answer(site, "evict", site.mountpoint / "train/1")["blocks"] == 10)
    assert site.origin()["lists"] == stored_lists


# -- pins ----------------------------------------------------------------------------------------


def test_pin_and_unpin(site: Site, content: dict[str, bytes]) -> None:
    read(site, content, "train/1/")
    stored(site, "train/1", 10 * SMALL)
    said = site.cli("pin", site.mountpoint / "train")
    assert said.stdout == "pinned 488.3 KiB of 1.4 MiB in 30 files\n"
    assert said.stderr == (
        f"976.6 KiB are not cached; to fetch and pin them: "
        f"cachefs load --pin {site.mountpoint}/train\n"
    )
    assert "pinned    488.3 KiB, 33 %" in site.cli("info", site.mountpoint / "train").stdout
    said = site.cli("evict", site.mountpoint / "train")
    assert said.stdout == "evicted 0 B in 0 blocks\n"
    assert "488.3 KiB are pinned and stay" in said.stderr
    assert cached_bytes(site, "train") == 10 * SMALL
    # It holds over a restart, also a crash.
    site.umount()
    site.mount()
    assert answer(site, "info", site.mountpoint / "train")["pinned_bytes"] == 10 * SMALL
    site.crash()
    site.expected_trouble = ("which a dead cachefs had left",)
    site.mount()
    assert answer(site, "info", site.mountpoint / "train")["pinned_bytes"] == 10 * SMALL
    said = site.cli("unpin", site.mountpoint / "train/1")
    assert said.stdout == "unpinned 488.3 KiB in 10 blocks\n"
    said = site.cli("evict", site.mountpoint / "train")
    assert said.stdout == "evicted 488.3 KiB in 10 blocks\n"


def test_pin_limit(site: Site) -> None:
    for number in range(100):
        (site.files / f"{number}").write_bytes(random.randbytes(MIB // 2))
    site.mount("--cache-size", "128MiB", "--pin-limit", "0.25")
    for number in range(100):
        (site.mountpoint / f"{number}").read_bytes()
    eventually(lambda: cached_bytes(site) == 50 * MIB)
    said = site.cli("pin", site.mountpoint, code=1)
    assert said.stdout == ""
    assert said.stderr.startswith("cachefs: error: 6")
    assert "more would be pinned" in said.stderr
    assert "0 B of at most 31" in said.stderr
    assert "nothing was pinned" in said.stderr
    assert said.stderr.count("\n") == 1
    (tier,) = site.status()["tiers"]
    assert tier["pinned_bytes"] == 0
    site.cli("pin", *(site.mountpoint / f"{number}" for number in range(20)))
    (tier,) = site.status()["tiers"]
    assert 10 * MIB <= tier["pinned_bytes"] <= tier["pin_limit_bytes"] <= 32 * MIB
    assert (
        "SSD: 13.4 MiB are pinned, of at most 31"
        in site.cli("tier", "list", site.mountpoint).stdout
    )
    for number in range(100):  # in its own way
        (site.mountpoint / f"{number}").read_bytes()
    assert answer(site, "info", site.mountpoint)["pinned_bytes"] == 10 * MIB


def test_evict_force(site: Site, content: dict[str, bytes]) -> None:
    read(site, content, "large")
    stored(site, "large", len(content["large"]))
    site.cli("pin", site.mountpoint / "large")
    assert answer(site, "evict", "--force", site.mountpoint)["blocks"] == 4
    assert cached_bytes(site) == 0


# -- refreshing ----------------------------------------------------------------------------------


def test_refresh_sees_what_changed_at_once(site: Site, content: dict[str, bytes]) -> None:
    mnt, files = site.mountpoint, site.files
    read(site, content)
    stored(site, "", sum(map(len, content.values())))
    site.cli("pin", mnt / "train/0/1.bin")
    assert not (mnt / "train/0/new").exists()
    assert sorted(os.listdir(mnt / "train/0"))[:1] == ["0.bin"]
    (files / "train/0/1.bin").write_bytes(b"other")
    (files / "train/0/2.bin").unlink()
    (files / "train/0/new").write_bytes(b"new")
    for child in (files / "train/2").iterdir():
        child.unlink()
    (files / "train/2").rmdir()
    assert (mnt / "train/0/1.bin").read_bytes() == content["train/0/1.bin"]
    gets = site.origin()["gets"]
    said = site.cli("refresh", mnt)
    assert said.stdout.startswith("1 changed, 1 new, 2 gone, of "), said.stdout
    assert "dropped 585.9 KiB of old versions" in said.stdout
    assert (mnt / "train/0/1.bin").read_bytes() == b"other"
    assert not (mnt / "train/0/2.bin").exists()
    assert (mnt / "train/0/new").read_bytes() == b"new"
    assert sorted(os.listdir(mnt / "train/0"))[-1:] == ["new"]
    assert "2.bin" not in os.listdir(mnt / "train/0")
    assert sorted(os.listdir(mnt / "train")) == ["0", "1"]
    assert answer(site, "info", mnt / "train/0/1.bin")["pinned_bytes"] == 0
    assert site.origin()["gets"] == gets + 2
    # What has not changed is still cached, and its inode is the same.
    read(site, content, "train/1")
    read(site, content, "large")
    assert site.origin()["gets"] == gets + 2
    said = site.cli("refresh", mnt)
    assert said.stdout.startswith("0 changed, 0 new, 0 gone, of ")


def test_refresh_a_file(site: Site, content: dict[str, bytes]) -> None:
    path = site.mountpoint / "large"
    read(site, content, "large")
    stored(site, "large", len(content["large"]))
    lists = site.origin()["lists"]
    assert answer(site, "refresh", path)["changed"] == 0
    (site.files / "large").write_bytes(b"small")
    told = answer(site, "refresh", path)
    assert (told["changed"], told["dropped_bytes"]) == (1, len(content["large"]))
    assert path.read_bytes() == b"small"
    assert path.stat().st_size == 5
    (site.files / "large").unlink()
    assert answer(site, "refresh", path)["gone"] == 1
    assert site.origin()["lists"] <= lists + 1  # because of the name that is absent
    assert not path.exists()
    (site.files / "large").write_bytes(b"again")
    assert answer(site, "refresh", path)["new"] == 1
    assert path.read_bytes() == b"again"


def test_the_kernel_knows_a_change_when_refresh_answers(
    site: Site, content: dict[str, bytes]
) -> None:
    """Without a process that ends between the answer and the look-up."""
    for number in range(50):
        path = site.mountpoint / f"new {number}"
        assert not path.exists()
        (site.files / path.name).write_bytes(b"new")
        request = PathRequest((str(path),), None)
        request.sums(api.CACHE_REFRESH, wait=False)
        assert path.read_bytes() == b"new"


def test_refresh_of_a_bucket(tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    bucket = seaweedfs.make_bucket("refreshed")
    data = {f"dir {number % 3}/ä{number}": b"%d" % number for number in range(1500)}
    seaweedfs.put_many(bucket, {f"pre/{name}": content for name, content in data.items()})
    site = Site(tmp_path, f"s3://{bucket}/pre")
    site.options = PATIENT
    site.environment = seaweedfs.environment
    try:
        site.mount("--list-ttl", "1h", "--entry-ttl", "1h", "--attr-ttl", "1h")
        read(site, data, "dir 1")
        assert len(os.listdir(site.mountpoint)) == 3
        assert len(os.listdir(site.mountpoint / "dir 1")) == 500
        seaweedfs.put(bucket, "pre/dir 1/ä4", b"other")
        seaweedfs.put(bucket, "pre/dir 1/new", b"new")
        seaweedfs.put(bucket, "pre/more/below", b"more")
        gets, heads = site.origin()["gets"], site.origin()["heads"]
        told = answer(site, "refresh", site.mountpoint)
        assert (told["changed"], told["new"], told["gone"]) == (1, 2, 0)
        assert told["directories"] == 2  # nobody has looked into the others
        assert site.origin()["heads"] == heads
        assert (site.mountpoint / "dir 1/ä4").read_bytes() == b"other"
        assert (site.mountpoint / "dir 1/new").read_bytes() == b"new"
        assert (site.mountpoint / "more/below").read_bytes() == b"more"
        read(site, {name: data[name] for name in data if name != "dir 1/ä4"}, "dir 1")
        assert site.origin()["gets"] == gets + 3
    finally:
        site.tear_down()


# -- what users do wrong -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A mount of one file, which no test changes."""
    site = Site(tmp_path_factory.mktemp("one"))
    (site.files / "file").write_bytes(b"x")
    site.mount()
    yield site
    site.tear_down()


@pytest.mark.parametrize("verb", ["info", "du", "evict", "pin", "unpin", "refresh"])
def test_nonsense_is_answered_with_one_line(one_file: Site, verb: str) -> None:
    site = one_file
    for arguments, code, text in (
        ([], 2, "missing argument 'path...'"),
        (["/"], 2, "/ lies in no mount"),
        ([""], 2, "an empty path"),
        (["--mount", str(site.mountpoint), "../x"], 2, "leads out of the mount"),
        (["--bogus", "x"], 2, "no such option"),
        (["--mount", "/nowhere", "x"], 1, "/nowhere is not mounted by cachefs"),
    ):
        said = site.cli(verb, *arguments, code=code)
        assert said.stdout == ""
        assert said.stderr.count("\n") == 1
        assert text in said.stderr.lower()
    said = site.cli(verb, site.mountpoint / "no\nsuch", code=1)
    assert "no such file or directory" in said.stderr
    said = site.cli(verb, site.mountpoint / "file/below", code=1)
    assert "not a directory" in said.stderr


def test_paths_as_users_write_them(
    site: Site, content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(site.mountpoint / "train")
    monkeypatch.chdir(site.mountpoint / "train/1")
    for path in (".", "../1", tmp_path / "link/1", f"{site.mountpoint}//train/./1/", "10.bin"):
        assert answer(site, "info", path)["inode"] > 1
    raw = os.fsdecode(b"raw-\xff")
    (site.files / raw).write_bytes(b"bytes")
    assert answer(site, "info", os.path.join(site.mountpoint, raw))["size_bytes"] == 5


def test_many_paths_at_once(site: Site, content: dict[str, bytes]) -> None:
    paths = [site.mountpoint / name for name in content] * 400
    assert len(answers(site, "info", *paths)) == len(paths)


def test_interrupted(site: Site, content: dict[str, bytes]) -> None:
    paths = [str(site.mountpoint)] * 3000
    with subprocess.Popen(
        [*CLI, "du", *paths], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr is not None
        assert process.stderr.read().strip() == "cachefs: error: interrupted"
    assert process.returncode == 130
    assert answer(site, "info", site.mountpoint)["files"] == 32


def test_what_cannot_be_shown_is_counted(site: Site) -> None:
    (site.files / "a/b").mkdir(parents=True)
    (site.files / "a/file").write_text("x")
    for name in ("pipe", "a/pipe", "a/b/pipe1", "a/b/pipe2"):
        os.mkfifo(site.files / name)
    site.mount()
    for _ in range(2):
        done = site.cli("du", "-s", site.mountpoint)
        assert f"{site.mountpoint}: 4 keys can't be shown as files" in done.stderr
    done = site.cli("du", "-s", site.mountpoint / "a/b", "--json")
    assert json.loads(done.stdout)["unshown_keys"] == 2
    site.cli("refresh", site.mountpoint)
    assert "NOT SHOWN      4 keys" in site.cli("status", site.mountpoint).stdout
    (site.files / "pipe").unlink()
    site.cli("refresh", site.mountpoint)
    assert site.status()["unshown_keys"] == 3
    examples = [line for line in site.log.read_text().splitlines() if "shown as files" in line]
    assert len(examples) == 3, "one for each directory, once"
