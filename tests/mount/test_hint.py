"""Hints through a real mount: the command, the module, and what both say where there is none."""

import random
import subprocess
from pathlib import Path

import pytest

from cachefs_hints import HintedSampler, Hints
from tests.mount.harness import Site, eventually

FILES = 60


@pytest.fixture
def names(site: Site) -> list[str]:
    """Paths of files in an order that no directory has; one of them is longer than one hint."""
    names = [f"d{number % 5}/{number:03}" for number in range(FILES)]
    names.append("/".join(["long" * 30] * 4) + "/file")
    for name in names:
        path = site.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 500)
    random.Random(5).shuffle(names)
    return names


def read(site: Site, name: str) -> None:
    assert (site.mountpoint / name).read_bytes() == name.encode() * 500


def test_the_command_sends_a_list(site: Site, names: list[str], tmp_path: Path) -> None:
    site.mount()
    listed = tmp_path / "order"
    listed.write_text("".join(f"{name}\n" for name in names))
    done = site.cli("hint", site.mountpoint, "-f", listed)
    assert f"{len(names)} paths were taken" in done.stderr
    eventually(lambda: site.origin()["gets"] == len(names))
    for name in names:
        read(site, name)
    assert site.origin()["gets"] == len(names)


def test_the_command_says_where_nobody_takes_hints(site: Site, tmp_path: Path) -> None:
    (tmp_path / "order").write_text("a\n")
    done = site.cli("hint", tmp_path, "-f", tmp_path / "order", code=2)
    assert "takes no hints" in done.stderr


def test_a_path_that_is_refused_is_told_and_the_others_are_sent(
    site: Site, names: list[str], tmp_path: Path
) -> None:
    site.mount()
    listed = tmp_path / "order"
    refused = "/".join(["x" * 200] * 30)
    wanted = [*names[:5], refused, *names[5:], refused + "/y"]
    listed.write_text("".join(f"{name}\n" for name in wanted))
    done = site.cli("hint", site.mountpoint, "-f", listed, code=2)
    assert f"{len(names)} paths were taken" in done.stderr
    assert "refused 2 paths, the first of them 'xxx" in done.stderr
    assert "Invalid argument" in done.stderr
    eventually(lambda: site.origin()["gets"] == len(names))
    with Hints(site.mountpoint) as hints:
        assert hints.send(["no\0name", names[0], names[1]]) == 2
        assert hints.refused_count == 1


def test_a_sampler_sends_its_epoch(site: Site, names: list[str]) -> None:
    site.mount()
    with Hints(site.mountpoint) as hints:
        sampler = HintedSampler(
            range(len(names)), hints, lambda index: site.mountpoint / names[index]
        )
        assert len(sampler) == len(names)
        indices = iter(sampler)
        first = next(indices)
        eventually(lambda: site.origin()["gets"] == len(names))
        read(site, names[first])
        for index in indices:
            read(site, names[index])
    assert site.origin()["gets"] == len(names)


def test_hints_below_a_directory_of_the_mount(site: Site, names: list[str]) -> None:
    site.mount()
    wanted = [name.removeprefix("d1/") for name in names if name.startswith("d1/")]
    with Hints(site.mountpoint / "d1") as hints:
        for name in hints.ahead_of(wanted):
            read(site, f"d1/{name}")
    assert site.origin()["gets"] == len(wanted)


def test_without_a_mount_nothing_happens(tmp_path: Path) -> None:
    with Hints(tmp_path) as hints:
        assert hints.send(["a", "b"]) == 0
        assert list(hints.ahead_of(["a", "b"])) == ["a", "b"]


def test_the_module_needs_nothing_else() -> None:
    """So it can be copied into an image."""
    module = Path(__file__).parents[2] / "src/cachefs_hints.py"
    code = f"import runpy; runpy.run_path({str(module)!r})['Hints']('/tmp').send(['a'])"
    command = ["python3", "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
