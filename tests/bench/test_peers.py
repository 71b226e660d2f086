"""The comparison with peers: the harness from end to end, and how it judges and shows figures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.peers import markdown, plot
from bench.peers.bars import BARS, judge
from bench.peers.figures import FIGURES, Measures
from bench.rig import ROOT

_COMMAND = [sys.executable, "-m", "bench.peers", "--tiny", "--only", "cold"]


@pytest.fixture
def measures() -> Measures:
    found = Measures()
    for value in (900.0, 1000.0, 5000.0):
        found.add("cold.16", "cachefs", value)
    for value in (500.0, 400.0, 600.0):
        found.add("cold.16", "JuiceFS", value)
    found.add("import.first", "cachefs", 12.0)
    found.add("import.first", "JuiceFS", 10.0)
    found.add("import.first", "rclone", 12.1)
    found.notes["warmup", "rclone"] = "it has no command that loads ahead"
    found.add("warmup.small", "cachefs", 1500.0)
    for peer, busiest_ms in (("cachefs", 1.0), ("JuiceFS", 0.25)):
        found.add("busiest.cold", peer, busiest_ms)
        found.add("most.cold", peer, 1000 / busiest_ms)
    return found


def test_bars_compare_medians(measures: Measures) -> None:
    verdicts = {
        (verdict.bar.key, verdict.bar.against): verdict
        for verdict in judge(measures)
        if verdict.met is not None
    }
    assert set(verdicts) == {("cold.16", "JuiceFS"), ("import.first", "JuiceFS")}
    cold, first = verdicts["cold.16", "JuiceFS"], verdicts["import.first", "JuiceFS"]
    assert cold.ratio == pytest.approx(2.0)
    assert cold.met
    assert first.ratio == pytest.approx(1.2)
    assert not first.met


def test_every_bar_is_about_a_figure() -> None:
    for bar in BARS:
        assert bar.key in FIGURES
        assert bar.their_key is None or bar.their_key in FIGURES


def test_the_page_names_who_is_ahead_and_what_is_missing(measures: Measures) -> None:
    page = markdown.render(
        measures, ["cachefs", "JuiceFS", "rclone"], ["a fact"], {"cachefs": "1"}, {}, "peers.svg"
    )
    assert "## Bars: 1 of 2 met" in page
    assert "- Python packages: first import: JuiceFS, 10 against 12 s (1.20x)" in page
    assert "- On many cores: busiest thread, small files, cold, 16 readers: JuiceFS, 0.250" in page
    assert "one mount's most, small files, cold, 16 readers: JuiceFS" not in page
    assert (
        "| one mount's most, small files, cold, 16 readers | files/s | 1,000 | **4,000** |" in page
    )
    assert "first import: rclone" not in page
    assert "| cold, 16 readers | files/s | **1,000** | 500 | - |" in page
    assert "| the small files | files/s | 1,500 | - | - [1] |" in page
    assert "1. it has no command that loads ahead" in page


def test_the_page_of_a_whole_run_has_all_bars(measures: Measures) -> None:
    page = markdown.render(measures, ["cachefs", "JuiceFS"], [], {}, {}, "peers.svg", whole=True)
    assert f"## Bars: 1 of {len(BARS)} met" in page
    assert page.count("not measured**") == len(BARS) - 2


def test_the_plot_is_well_formed(measures: Measures) -> None:
    drawing = ET.fromstring(plot.draw(measures, ["cachefs", "JuiceFS", "rclone"]))
    texts = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert "Small files: cold, 16 readers" in texts
    assert "1,000" in texts


@pytest.fixture
def _can_mount() -> None:
    if not os.access("/dev/fuse", os.W_OK) or shutil.which("fusermount3") is None:
        pytest.skip("no /dev/fuse or no fusermount3 here: nothing can be mounted")


@pytest.mark.mount
@pytest.mark.server
@pytest.mark.usefixtures("_can_mount")
def test_one_workload_with_two_peers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [*_COMMAND, "--peers", "cachefs,rclone", "--cachefs-option=--readahead 0", "--out", out],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((out / "peers.json").read_text())["values"]
    for figure in ("cold.1", "cold.16", "busiest.cold", "most.cold"):
        assert values[figure].keys() == {"cachefs", "rclone"}, done.stdout
        assert all(found > 0 for rounds in values[figure].values() for found in rounds)
    page = (out / "RESULTS.md").read_text()
    assert "| cold, 16 readers | files/s |" in page
    assert "--readahead 0" in page
    assert "rclone mount" in page
    assert (out / "peers.svg").is_file()
    assert not list(tmp_path.glob("cachefs-*"))


@pytest.mark.mount
@pytest.mark.server
@pytest.mark.usefixtures("_can_mount")
def test_interrupted_it_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*_COMMAND, "--peers", "cachefs,rclone"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "cold: round" in line:
                break
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, said
    assert not list(tmp_path.glob("cachefs-*"))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
