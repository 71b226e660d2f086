"""The relay tells the disk what a sequential reader wants next; a sick disk may keep it there."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from cachefs.fuse import relay
from tests.mount.harness import MIB, Site, drop_pages, eventually

if relay.why_not() is not None:
    pytest.skip(str(relay.why_not()), allow_module_level=True)

HANGS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

int posix_fadvise(int fd, off_t offset, off_t length, int advice) {
    int (*real)(int, off_t, off_t, int) = dlsym(RTLD_NEXT, "posix_fadvise");
    if (advice == POSIX_FADV_WILLNEED) {
        while (access(getenv("TEST_HANGS"), F_OK) == 0) usleep(10000);
    }
    return real(fd, offset, length, advice);
}
"""


def library(directory: Path) -> Path:
    compiler = shutil.which("cc")
    assert compiler is not None
    (directory / "hangs.c").write_text("#include <stdlib.h>\n" + HANGS)
    built = directory / "hangs.so"
    command = [compiler, "-shared", "-fPIC", "-o", built, directory / "hangs.c", "-ldl"]
    subprocess.run(command, check=True)
    return built


def test_reads_go_on_while_the_disk_keeps_who_tells_it_what_comes_next(tmp_path: Path) -> None:
    site = Site(tmp_path)
    hangs = tmp_path / "hangs"
    site.environment = {"LD_PRELOAD": str(library(tmp_path)), "TEST_HANGS": str(hangs)}
    large, small = os.urandom(12 * MIB), os.urandom(30_000)
    (site.files / "large").write_bytes(large)
    (site.files / "small").write_bytes(small)
    try:
        site.mount("--data-path", "relay")

        def read_all() -> None:
            for name, content in (("large", large), ("small", small)):
                drop_pages(site.mountpoint / name)
                assert (site.mountpoint / name).read_bytes() == content

        def are_served() -> bool:
            before = site.status()["relay"]["missed"]
            read_all()
            return bool(site.status()["relay"]["missed"] == before)

        eventually(are_served)
        hangs.touch()
        done: list[int] = []

        def read() -> None:
            read_all()
            done.append(1)

        readers = [threading.Thread(target=read, daemon=True) for _ in range(4)]
        for reader in readers:
            reader.start()
        eventually(lambda: len(done) == len(readers))
    finally:
        hangs.unlink(missing_ok=True)
        site.tear_down()
