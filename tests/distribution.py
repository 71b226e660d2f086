"""How `--dist loadfile` shares the tests out among workers (see `pytest_plugins` of conftest.py).

A worker takes a whole file at a time. What takes long comes first, so that no worker is left with
it in the end. All tests with Hadoop's HDFS go to one worker: each start takes 20 s.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_LONGEST_FIRST = ("tests/crash/", "hdfs", "tests/model/", "tests/mount/", "tests/origin/")
"""Units by what they begin with. The rest follows."""


def unit_of(nodeid: str) -> str:
    """Return the name of what one worker runs as a whole: the test's file, or `hdfs`."""
    file, _, test = nodeid.partition("::")
    needs_hdfs = file.startswith(("tests/mount/", "tests/origin/")) and "hdfs" in file + test
    return "hdfs" if needs_hdfs else file


def _turn(item: pytest.Item) -> int:
    unit = unit_of(item.nodeid)
    turns = (turn for turn, start in enumerate(_LONGEST_FIRST) if unit.startswith(start))
    return next(turns, len(_LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order in which workers take them."""
    items.sort(key=_turn)


class _Units(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """See the module. Other ways to share out stay as they are."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # xdist's order: the files with the most tests first
    return _Units(config, log)
