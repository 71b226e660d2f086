"""Mounts for tests: `site` is each test's own, `shared` is for those that only look."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MIB, Site

ODD_NAMES = (
    "with space",
    "ünïcödé 文字 🙂",
    "100%",
    "%41",
    "a+b",
    "#hash",
    "q?uestion",
    "semi;colon",
    "quote'\"",
    "back\\slash",
    "-dash",
    "~tilde",
    "&amp;",
    "n" * 255,
)


@pytest.fixture(scope="session", autouse=True)
def _can_mount() -> None:
    if not os.access("/dev/fuse", os.W_OK) or shutil.which("fusermount3") is None:
        pytest.skip("no /dev/fuse or no fusermount3 here: nothing can be mounted")


def _lmdb_module() -> Path:
    """A shared object that is sure to be here: the C part of a package that we depend on."""
    import lmdb.cpython

    return Path(lmdb.cpython.__file__)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.tear_down()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Mounted with --file-mode 0755. Do not change its files."""
    site = Site(tmp_path_factory.mktemp("shared"))
    noise = random.Random(1)
    files = site.files
    (files / "small").write_bytes(b"0123456789" * 10)
    (files / "empty").write_bytes(b"")
    (files / "large").write_bytes(noise.randbytes(5 * MIB + 123))
    (files / "mapped").write_bytes(noise.randbytes(3 * MIB + 7))
    (files / "script").write_text("#!/bin/sh\necho ran $1\n")
    shutil.copy("/bin/true", files / "binary")
    shutil.copy(_lmdb_module(), files / "shared.so")
    (files / "deep/er").mkdir(parents=True)
    (files / "deep/er/file").write_text("down here")
    (files / "odd").mkdir()
    for name in ODD_NAMES:
        (files / "odd" / name).write_text(name)
    (files / "big").mkdir()
    for number in range(2_500):
        (files / "big" / f"file-{number:05}").write_bytes(b"x" * (number % 7))
    site.mount("--file-mode", "755", "--dir-mode", "711", "--uid", "12", "--gid", "34")
    yield site
    site.tear_down()
