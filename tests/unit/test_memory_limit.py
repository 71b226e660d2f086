"""The control group's limit, of both versions, and what it leaves for data on their way."""

from pathlib import Path

import pytest

from cachefs.daemon import memory_limit
from cachefs.daemon.memory_limit import bounded_buffer

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def limited(groups: Path, proc: str, limits: dict[str, str]) -> int | None:
    file = groups.with_name("proc")
    file.write_text(proc)
    for name, text in limits.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit.memory_limit(file, groups)


def test_the_least_limit_of_a_group_and_those_above_it(groups: Path) -> None:
    limits = {
        "memory.max": "max\n",
        "pods/memory.max": "1000\n",
        "pods/a/memory.max": "3000\n",
        "pods/b/memory.max": "7\n",
    }
    assert limited(groups, "0::/pods/a\n", limits) == 1000


def test_a_container_sees_its_own_group_as_the_top(groups: Path) -> None:
    assert limited(groups, "0::/\n", {"memory.max": "2000\n"}) == 2000


def test_version_1(groups: Path) -> None:
    proc = "5:cpu,cpuacct:/x\n4:memory:/y\n"
    assert limited(groups, proc, {"memory/y/memory.limit_in_bytes": "5000\n"}) == 5000


def test_none(groups: Path) -> None:
    assert limited(groups, "0::/a\n", {"a/memory.max": "max\n"}) is None
    assert memory_limit.memory_limit(groups / "nothing", groups) is None


def test_a_quarter_is_for_data_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, wanted, bounded in [
        (None, 300 * MIB, 300 * MIB),
        (200 * MIB, 300 * MIB, 50 * MIB),
        (2000 * MIB, 300 * MIB, 300 * MIB),
        (10 * MIB, 300 * MIB, 8 * MIB),
        (10 * MIB, 4 * MIB, 4 * MIB),
        (200 * MIB, 20 * MIB, 20 * MIB),
    ]:
        monkeypatch.setattr(memory_limit, "memory_limit", lambda limit=limit: limit)
        assert bounded_buffer(wanted) == bounded
