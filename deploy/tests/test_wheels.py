"""The wheels on a bare machine: from nothing to a mount in three commands."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.tests.bare import DIST, Machine, check_object_store, check_served, check_upgrade
from deploy.tests.newer import VERSION, newer_wheel

TAGS = {"cp311": "bookworm", "cp313": "trixie"}
LIBCURL = {"cp311": "libcurl4", "cp313": "libcurl4t64"}
WHEELS = sorted((DIST / "wheels").glob("cachefs-*.whl"))


def test_there_are_wheels() -> None:
    assert WHEELS


@pytest.fixture
def wheel(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def machine(wheel: Path, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(TAGS[wheel.name.split("-")[2]], tmp_path / "root")
    yield machine
    machine.close()


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name, indirect=True)
def test_from_the_first_command_to_the_last(machine: Machine, wheel: Path, tmp_path: Path) -> None:
    shutil.copytree(DIST / "wheels", machine.root / "wheels")
    machine.run("apt-get install -y fuse3 python3-venv")
    said = machine.run("unshare --net wheels/install")  # there is no internet
    assert "s3:// and oss:// can't be mounted yet: libcurl 7.87 or newer" in said
    machine.run("cachefs mount file:///data /mnt")
    check_served(machine)
    machine.run("! command -v gcc")

    (line,) = machine.run("mkdir /s3; cachefs mount s3://data /s3", code=2).splitlines()
    assert "s3:// can't be opened: libcurl 7.87 or newer" in line
    machine.run(f"apt-get install -y --no-install-recommends {LIBCURL[wheel.name.split('-')[2]]}")
    check_object_store(machine, tmp_path / "store")

    newer_wheel(wheel, machine.root / "wheels")
    pip = "/opt/cachefs/bin/pip install --no-index --find-links wheels --upgrade cachefs"
    check_upgrade(machine, f"{pip} && cachefs upgrade --all", VERSION)

    machine.run("cachefs umount /mnt")
    machine.run("rm -r /opt/cachefs /usr/local/bin/*cachefs")
    machine.run("! command -v cachefs")
