"""Measure `--prefetch siblings` over a distant origin: for a job that reads all files of a tree in
random order, and for one that reads a few of them."""

import os
from typing import NamedTuple

from bench import rig
from bench.case import Bench, discard, shuffled
from bench.report import Row, ratio_row

EPOCH_BAR = 3.0
LIST_BAR = 1.0
ORDER_LIST_BAR = 0.02
_CASE = "--prefetch siblings, files in directories, 1 reader"
_ROUNDS = 1
"""A shuffled epoch takes a minute. Use more rounds to compare two versions."""
_SAMPLE_FILES = 200
"""Without siblings every file of a shuffled epoch takes about as long as these."""
_LIST_SHARE = 0.05
_LEAST_BYTES = 8 << 20
"""Siblings may always cost so much, and a short list of small files is no more."""


class _Epoch(NamedTuple):
    """What reading some files of a new mount took: `extra` are the bytes that the origin sent
    beyond those that were read, as a share of these, or of `_LEAST_BYTES` if that is more."""

    files_s: float
    extra: float


def measure(bench: Bench, endpoint: str) -> list[Row]:
    """Measure both jobs, with a new mount and an empty cache each. With `order` a part of the
    shuffled epoch is enough."""
    names = bench.tree_files()
    listed = int(len(names) * _LIST_SHARE)
    epochs, samples, lists, ordered_lists = [], [], [], []
    for turn in range(_ROUNDS):
        bench.say(f"siblings: round {turn + 1} of {_ROUNDS}")
        order = shuffled(names, 3000 + turn)
        samples.append(_read(bench, endpoint, "order", order[:_SAMPLE_FILES]).files_s)
        epochs.append(_read(bench, endpoint, "siblings", order).files_s)
        lists.append(_read(bench, endpoint, "siblings", order[:listed]).extra)
        ordered_lists.append(_read(bench, endpoint, "order", order[:listed]).extra)
    return [
        ratio_row(_CASE, "shuffled epoch", "files/s", epochs, samples, "order", at_least=EPOCH_BAR),
        _extra_row("5 % of the files, extra bytes", lists, LIST_BAR),
        _extra_row("the same with order", ordered_lists, ORDER_LIST_BAR),
    ]


def _extra_row(figure: str, shares: list[float], most: float) -> Row:
    worst = max(shares)
    bar = f"<= {most:g}"
    return Row(_CASE, figure, "of read", worst, bar=bar, passed=worst <= most,
               rounds={"cachefs": shares})  # fmt: skip


def _read(bench: Bench, endpoint: str, prefetch: str, names: list[str]) -> _Epoch:
    mount = bench.mount("tree", "--prefetch", prefetch, endpoint=endpoint)
    with mount:
        for _ in os.walk(mount.path):
            pass  # the tree is listed
        before_bytes = mount.status()["origin"]["get_bytes"]
        reading = rig.read_files(mount.path, names, list_file=bench.list_file)
        got_bytes = mount.status()["origin"]["get_bytes"] - before_bytes
    discard(mount)
    return _Epoch(reading.files_s, (got_bytes - reading.bytes) / max(reading.bytes, _LEAST_BYTES))
