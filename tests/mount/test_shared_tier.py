"""Mounts that share a tier, on real memcached processes."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mount.harness import DATA_PATH, MIB, Site, eventually, kill_daemon
from tests.shared.harness import Members, closed_port, memcacheds

FILES = 30


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with memcacheds(tmp_path, 3) as started:
        yield started


@contextmanager
def node(directory: Path, of: Site, *options: object) -> Iterator[Site]:
    """Another mount of the same source, with a cache of its own."""
    directory.mkdir()
    site = Site(directory, of.source)
    try:
        site.mount(*options)
        yield site
    finally:
        site.tear_down()


@pytest.fixture
def content(site: Site) -> dict[str, bytes]:
    noise = random.Random(5)
    content = {f"d{n % 3}/file-{n:02}.jpg": noise.randbytes(100_000 + n) for n in range(FILES)}
    content["large.bin"] = noise.randbytes(9 * MIB + 123)
    for name, data in content.items():
        path = site.files / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return content


def blocks(content: dict[str, bytes]) -> int:
    return sum(-(-len(data) // MIB) for data in content.values())


def assert_readable(site: Site, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        assert (site.mountpoint / name).read_bytes() == data


def assert_stored(site: Site, count: int) -> None:
    eventually(lambda: site.status()["shared"]["stored_blocks"] >= count)


def test_a_second_node_needs_no_gets(
    site: Site, members: Members, content: dict[str, bytes], tmp_path: Path
) -> None:
    site.mount("--shared", members.option)
    site.cli("load", site.mountpoint)
    assert_stored(site, blocks(content))
    with node(tmp_path / "second", site, "--shared", members.option) as second:
        said = second.cli("load", second.mountpoint).stdout
        assert f"of {len(content)} files" in said
        assert second.origin()["gets"] == 0
        assert_readable(second, content)
        assert second.origin()["gets"] == 0
        shared = second.status()["shared"]
        assert shared["hits"] == blocks(content)
        assert shared["hit_bytes"] == sum(map(len, content.values()))


def test_mounts_of_different_prefixes_share(
    site: Site, members: Members, content: dict[str, bytes], tmp_path: Path
) -> None:
    site.mount("--shared", members.option)
    assert_readable(site, content)
    assert_stored(site, blocks(content))
    below = Site.__new__(Site)
    below.source = f"{site.source}/d1"
    with node(tmp_path / "second", below, "--shared", members.option) as second:
        names = {name[3:]: data for name, data in content.items() if name.startswith("d1/")}
        assert_readable(second, names)
        assert second.origin()["gets"] == 0


def test_a_secret(site: Site, members: Members, content: dict[str, bytes], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    options = ("--shared", members.option, "--shared-secret-file", secret)
    site.mount(*options)
    assert_readable(site, content)
    assert_stored(site, blocks(content))
    with node(tmp_path / "without", site, "--shared", members.option) as other:
        assert_readable(other, content)
        assert other.status()["shared"]["hits"] == 0
    with node(tmp_path / "with", site, *options) as other:
        assert_readable(other, content)
        assert other.origin()["gets"] == 0
    said = site.cli("status", "--json", site.mountpoint).stdout + site.log.read_text()
    assert "correct horse" not in said
    if DATA_PATH == "python":
        return  # no supervisor starts another daemon
    kill_daemon(site)
    secret.unlink()
    site.expected_trouble = (
        "what is cached is served on",
        "the mount goes on without the shared tier",
    )
    kill_daemon(site)
    assert_readable(site, content)


def test_dead_members(site: Site, content: dict[str, bytes]) -> None:
    addresses = ",".join(f"127.0.0.1:{closed_port()}" for _ in range(3))
    site.mount("--shared", addresses)
    assert_readable(site, content)
    shared = site.status()["shared"]
    assert shared["state"] == "bypassed"
    assert "BYPASSED" in site.cli("status", site.mountpoint).stdout


def test_a_member_that_dies_under_readers(
    site: Site, members: Members, content: dict[str, bytes], tmp_path: Path
) -> None:
    site.mount("--shared", members.option)
    assert_readable(site, content)
    assert_stored(site, blocks(content))
    with node(tmp_path / "second", site, "--shared", members.option) as second:
        for number, (name, data) in enumerate(content.items()):
            if number == FILES // 3:
                members[0].kill()
            assert (second.mountpoint / name).read_bytes() == data
        assert second.status()["shared"]["state"] == "in use"


def test_changes_while_mounted(
    site: Site, members: Members, content: dict[str, bytes], tmp_path: Path
) -> None:
    """`cachefs set`, and the next daemon has it, too."""
    site.expected_trouble = ("what is cached is served on",)
    site.mount("--shared", "off")
    assert "shared" not in site.status()
    assert "has no shared tier" in site.cli("shared", "status", site.mountpoint).stdout
    site.cli("set", site.mountpoint, f"shared={members.option}", "shared-size=1GiB")
    eventually(lambda: site.status()["shared"]["state"] == "in use")
    if DATA_PATH != "python":
        kill_daemon(site)
    eventually(lambda: site.status()["shared"]["state"] == "in use")
    assert site.status()["shared"]["size_bytes"] == 1 << 30
    assert_readable(site, content)
    assert_stored(site, blocks(content))
    site.cli("set", site.mountpoint, "shared=off")
    assert "shared" not in site.status()


def test_what_is_shown(site: Site, members: Members, content: dict[str, bytes]) -> None:
    site.mount("--shared", members.option)
    assert_readable(site, content)
    assert_stored(site, blocks(content))
    shown = site.cli("shared", "status", site.mountpoint).stdout
    for member in members:
        assert member.address in shown
    assert "nothing is wrong" in site.cli("shared", "check", site.mountpoint).stdout
    answer = json.loads(site.cli("shared", "status", "--json", site.mountpoint).stdout)
    assert answer["shared"]["stored_blocks"] == blocks(content)
    assert "shared    10 of 10 blocks" in site.cli("info", site.mountpoint / "large.bin").stdout
    assert "SHARED TIER" in site.cli("status", site.mountpoint).stdout
    header = site.cli("stats", "-n", "1", "-i", "0.1", site.mountpoint).stdout.splitlines()[0]
    assert " SHAR " in header
    members[1].stop()
    said = site.cli("shared", "check", site.mountpoint, code=1).stdout
    assert said.startswith(members[1].address)
    assert said.count("\n") == 1


def test_bad_options(site: Site, tmp_path: Path) -> None:
    assert "no member" in site.refused("--shared", "nonsense", code=2)
    missing = tmp_path / "missing"
    said = site.refused("--shared", "127.0.0.1:1", "--shared-secret-file", missing, code=2)
    assert "--shared-secret-file" in said


def test_a_file_of_members(
    site: Site, members: Members, content: dict[str, bytes], tmp_path: Path
) -> None:
    site.expected_trouble = ("shared tier: the members can't be read",)
    file = tmp_path / "members"
    site.mount("--shared", file)
    assert_readable(site, content)
    assert site.status()["shared"]["state"] == "no members"
    (tmp_path / "new").write_text("\n".join(member.address for member in members))
    os.replace(tmp_path / "new", file)
    eventually(lambda: site.status()["shared"]["state"] == "in use")
