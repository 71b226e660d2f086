"""The version: `scripts/version` in repositories of every kind, and what the builds make of it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.version import Version

from tests.unit.texts import ROOT

SCRIPT = ROOT / "scripts/version"


class Checkout:
    """Sources with the script in them, and perhaps a repository."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "scripts").mkdir(parents=True, exist_ok=True)
        (top / "src/cachefs").mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPT, top / "scripts")

    def git(self, *args: object) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
        command = ["git", *author, "-C", self.top, *args]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)

    def commit(self, text: str = "text") -> None:
        (self.top / "file").write_text(text)
        (self.top / ".gitignore").write_text("_version.py*\n")
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "--message", text)

    def version(self, *args: str, warning: str = "") -> str:
        done = subprocess.run(
            [self.top / "scripts/version", *args], capture_output=True, text=True, check=True
        )
        assert warning in done.stderr
        assert bool(done.stderr) is bool(warning), done.stderr
        return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path / "checkout")
    checkout.git("init", "--quiet")
    checkout.commit("first")
    return checkout


def debian(versions: Sequence[str]) -> list[str]:
    """The versions as the Debian package has them."""
    script = 'source deploy/packages/common.sh; for each in "$@"; do debian_version "$each"; done'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *versions],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_versions_grow_with_commits_changes_and_tags(checkout: Checkout) -> None:
    versions = ["0.1.0", checkout.version()]
    assert re.fullmatch(r"0\.1\.1\.dev1\+g[0-9a-f]{9}", versions[-1])
    for text in ("2", "3", "4", "5", "6", "7", "8", "9", "10"):
        checkout.commit(text)
    versions.append(checkout.version())
    assert "dev10+" in versions[-1]
    for seconds in (2_000_000_000, 2_000_000_001):
        (checkout.top / "file").write_text("changed")
        os.utime(checkout.top / "file", (seconds, seconds))
        versions.append(checkout.version())
    assert versions[-1].endswith(".d20330518033321")
    for tag in ("v0.2.0rc1", "v0.2.0", "v0.2.1"):
        checkout.commit(tag)
        checkout.git("tag", tag)
        assert checkout.version() == tag[1:]
        versions.append(tag[1:])
        checkout.commit(f"after {tag}")
        versions.append(checkout.version())
    (checkout.top / "file").unlink()
    versions.append(checkout.version())
    assert [version.partition("+")[0] for version in versions[5:]] == [
        *("0.2.0rc1", "0.2.0rc2.dev1", "0.2.0", "0.2.1.dev1", "0.2.1", "0.2.2.dev1", "0.2.2.dev1")
    ]
    assert sorted(versions, key=Version) == versions
    if shutil.which("dpkg") is None:
        pytest.skip("no dpkg here")
    packages = debian(versions)
    assert packages[1] == versions[1].replace(".dev", "~dev")
    for older, newer in pairwise(packages):
        subprocess.run(["dpkg", "--compare-versions", older, "lt", newer], check=True)


def test_the_hash_does_not_change_the_order_of_debian_packages() -> None:
    if shutil.which("dpkg") is None:
        pytest.skip("no dpkg here")
    assert debian(["1.2.3rc1.dev4+g1a2b3rc4e"]) == ["1.2.3~rc1~dev4+g1a2b3rc4e"]


def test_git_sees_no_change_after_the_version_was_written(checkout: Checkout) -> None:
    version = checkout.version("--write")
    file = checkout.top / "src/cachefs/_version.py"
    assert file.read_text() == f'__version__ = "{version}"\n'
    assert os.listdir(file.parent) == ["_version.py"]
    assert checkout.version() == version
    checkout.commit("second")
    assert checkout.version() != version


def test_a_clone_of_depth_1_has_a_version(checkout: Checkout) -> None:
    checkout.commit("second")
    shallow = checkout.top.parent / "shallow"
    checkout.git("clone", "--quiet", "--depth", "1", f"file://{checkout.top}", shallow)
    Checkout(shallow)
    assert "0.1.1.dev1+g" in Checkout(shallow).version(warning="run: git fetch --unshallow --tags")


def test_without_git_the_file_says_the_version(checkout: Checkout) -> None:
    """Also if there is a repository of something else around the sources."""
    inner = Checkout(checkout.top / "sdist")
    assert inner.version() == "0.1.1.dev0"
    (inner.top / "src/cachefs/_version.py").write_text('__version__ = "1.2.3"\n')
    assert inner.version("--write") == "1.2.3"


@pytest.mark.root
def test_root_may_build_in_the_clone_of_another_user(checkout: Checkout) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    version = checkout.version()
    for path in (checkout.top, *checkout.top.rglob("*")):
        os.chown(path, 12345, 12345)
    assert checkout.version() == version
    assert {path.stat().st_uid for path in (checkout.top / ".git").rglob("*")} == {12345}


@pytest.mark.long
def test_an_sdist_says_its_version(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for script in (SCRIPT, SCRIPT.with_name("fetch")):
        shutil.copy(script, tree / "scripts")
    for path in ("control/console/static", "csi/spec"):
        shutil.copytree(ROOT / "src/cachefs" / path, tree / "src/cachefs" / path)
    (tree / "src/cachefs/__init__.py").touch()
    (tree / "src/cachefs_hints.py").touch()
    (tree / "src/cachefs/_version.py").write_text('__version__ = "1.2.3.dev4+g5"\n')
    build = "from setuptools import build_meta; build_meta.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    archive = tree / "cachefs-1.2.3.dev4+g5.tar.gz"
    subprocess.run(["tar", "-C", tmp_path, "-xf", archive], check=True)
    unpacked = tmp_path / "cachefs-1.2.3.dev4+g5"
    assert (unpacked / "scripts/version").exists()
    assert Checkout(unpacked).version() == "1.2.3.dev4+g5"
