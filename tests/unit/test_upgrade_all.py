"""`cachefs upgrade --all` without mounts; tests/mount/test_supervisor.py has it with some."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cachefs.cli import main, upgrade
from cachefs.cli.mounts.all_mounts import FOREIGN, SERVING, SILENT, STALE, UNKNOWN
from cachefs.errors import MountError


def run(monkeypatch: pytest.MonkeyPatch, states: dict[str, str], broken: str = "") -> Result:
    def collect() -> list[dict[str, Any]]:
        return [
            {"mountpoint": place, "state": state, "problem": f"{state} it is"}
            for place, state in states.items()
        ]

    def one(place: Path) -> None:
        if str(place) == broken:
            raise MountError(f"{place}: no")
        print(f"{place} done")

    monkeypatch.setattr(upgrade, "collect", collect)
    monkeypatch.setattr(upgrade, "_upgrade", one)
    return CliRunner().invoke(main, ["upgrade", "--all"])


def test_nothing_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, {})
    assert (done.exit_code, done.stdout) == (0, "nothing is mounted\n")


def test_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, {"/a": SERVING, "/b": SERVING})
    assert (done.exit_code, done.stdout) == (0, "/a done\n/b done\n")


def test_a_failure_does_not_keep_the_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, {"/a": SERVING, "/b": SILENT, "/c": SERVING}, broken="/b")
    assert (done.exit_code, done.stdout) == (1, "/a done\n/c done\n")
    assert done.stderr == "cachefs: error: /b: no\n"


def test_mounts_that_nobody_here_can_upgrade_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, {"/a": FOREIGN, "/b": STALE, "/c": SERVING, "/d": UNKNOWN})
    assert done.exit_code == 0
    assert "/d: not known here it is\n" in done.stdout
    assert "/a: another user's it is\n" in done.stdout
    assert "/b: stale it is\n" in done.stderr
    assert "/c done\n" in done.stdout


@pytest.mark.parametrize("more", [["/mnt"], ["-c", "file"]])
def test_all_and_one_contradict_each_other(more: list[str]) -> None:
    done = CliRunner().invoke(main, ["upgrade", "--all", *more])
    assert done.exit_code == 2
    assert "--all upgrades all mounts" in done.stderr
