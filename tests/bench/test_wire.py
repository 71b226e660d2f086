"""The figures of reads and writes beside another work tree: how they are judged and counted."""

import os
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from bench import procfs, wire
from bench.case import QUICK, Bench


@pytest.fixture
def figures() -> wire.Figures:
    found: wire.Figures = defaultdict(lambda: defaultdict(list))
    for side, small in (("cachefs", 900.0), ("base", 600.0), ("obstore", 1000.0)):
        for key in ("small", "tls", "large", "far.large", "load", "far.load", "written"):
            found[key][side] = [small, small, 1.0]
        for key in ("small.main", "small.all", "large.main", "large.all"):
            found[key][side] = [100 / small, 100 / small, 1.0]
    found["written"]["best peer"] = [800.0, 800.0, 1.0]
    return found


def test_bars_judge_medians_beside_obstore_and_the_best_peer(figures: wire.Figures) -> None:
    rows = {row.figure: row for row in wire.rows(QUICK, figures, "")}
    assert rows["cold, 16 readers / obstore"].ratio == pytest.approx(0.9)
    assert rows["cold, 16 readers / obstore"].passed
    assert not rows["load / obstore"].passed
    assert rows["large file in order, far"].passed
    assert not rows["written, 16 writers / best peer"].passed
    assert rows["small, 16 readers: main thread"].cachefs == pytest.approx(1 / 9)
    assert rows["small, 16 readers: main thread"].passed
    assert not rows["large, in order: main thread"].passed


def test_another_work_tree_stands_beside_each_figure(figures: wire.Figures) -> None:
    rows = wire.rows(QUICK, figures, "0123abc")
    beside = {row.figure: row.ratio for row in rows if row.against == "base"}
    assert beside["cold, 16 readers"] == pytest.approx(1.5)
    assert beside["small, 16 readers: main thread"] == pytest.approx(2 / 3)
    assert len(beside) == 11


def test_a_mount_of_another_work_tree_gets_its_own_directory(tmp_path: Path) -> None:
    class NoServer:
        environment = {"AWS_REGION": "here"}  # noqa: RUF012
        endpoint = "http://127.0.0.1:1"

    bench = Bench(tmp_path, NoServer(), QUICK, print)  # type: ignore[arg-type]
    other = bench.of_tree(tmp_path / "tree")
    assert other.environment == {"AWS_REGION": "here", "PYTHONPATH": f"{tmp_path}/tree/src"}
    assert bench.environment == {"AWS_REGION": "here"}
    assert len({each.mount("small").path for each in (bench, other, bench)}) == 3


def test_each_thread_has_its_own_cpu_time() -> None:
    began, end = threading.Event(), threading.Event()

    def work() -> None:
        sum(range(3_000_000))
        began.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    try:
        found = procfs.cpu_s_of_threads(os.getpid())
        assert thread.native_id is not None
        assert found[thread.native_id] > 0.005
    finally:
        end.set()
        thread.join()
    assert procfs.cpu_s_of_threads(2**22 + 1) == {}
