"""`cachefs set` before a daemon that only takes notes, and the daemon's side of it."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cachefs.cli import main
from cachefs.cli import set as set_module
from cachefs.config import LIVE, load_mount_config
from cachefs.control import api
from cachefs.control.api import Route
from cachefs.control.routes.set import LiveOption, SetRoutes, live_options
from cachefs.errors import CachefsError, UsageError
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.uid_limits import UidLimits
from cachefs.mounts import RuntimeEntry
from cachefs.namespace.namespace import Ttls
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.shared.tier import SharedTier
from tests.memory_origin import MemoryOrigin

MIB = 1 << 20
CONTROL = (Path(__file__).parents[2] / "docs/CONTROL.md").read_text()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the daemon was asked; it answers that all was unlimited."""
    seen: list[dict[str, Any]] = []

    def ask(
        path: Path, route: Route, arguments: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        assert route == api.SET
        seen.append(arguments)
        after = {"limit_uid": {}} | arguments
        after["limit_uid"] = {str(uid): rate for uid, rate in after["limit_uid"].items()}
        return {
            "before": {
                "max_downloads": 64,
                "download_limit": 0,
                "limit_uid": {},
                "access_log": "off",
            },
            "after": after,
        }

    monkeypatch.setattr(set_module, "ask", ask)
    monkeypatch.setattr(
        set_module,
        "find_entry",
        lambda place: RuntimeEntry(str(place), "s3://b", 1, 0.0, alive=True),
    )
    return seen


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["set", *args])


def test_set(asked: list[dict[str, Any]]) -> None:
    result = run(
        "/mnt", "max-downloads=8", "download-limit=10MiB/s", "limit-uid=7=1MiB", "limit-uid=8=2MiB"
    )
    assert result.exit_code == 0, result.output
    assert asked == [
        {"max_downloads": 8, "download_limit": 10 * MIB, "limit_uid": {7: MIB, 8: 2 * MIB}}
    ]
    assert [line.partition(" until")[0] for line in result.stdout.splitlines()] == [
        "max-downloads was 64 and is 8",
        "download-limit was unlimited and is 10 MiB/s",
        "limit-uid of 7 was unlimited and is 1 MiB/s",
        "limit-uid of 8 was unlimited and is 2 MiB/s",
    ]


def test_the_access_log_is_named_as_seen_from_here(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("/mnt", "access-log=file").stdout
    assert said == f"access-log was off and is {tmp_path}/file until the mount ends\n"
    run("/mnt", "access-log=off")
    assert asked == [{"access_log": f"{tmp_path}/file"}, {"access_log": "off"}]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("max-downloads", "write NAME=VALUE"),
        ("max-downloads=", "write NAME=VALUE"),
        ("max-downloads=0", "max-downloads: 0 is not a whole number from 1 to 4096"),
        ("max_download=1", 'did you mean "max_downloads"'),
        (
            "cache-size=1GiB",
            "can't be changed while mounted; these can be changed: access-log, attr-ttl, debug",
        ),
        ("download-limit=1", "is too slow; the least is 64 KiB per second"),
        ("limit-uid=7", "write UID=SIZE"),
        ("limit-uid=root=1MiB", '"root" is not a whole number'),
        ("limit-uid=7=fast", "is not a size"),
    ],
)
def test_wrong_settings(asked: list[dict[str, Any]], setting: str, said: str) -> None:
    result = run("/mnt", setting)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not asked


def test_settings_given_twice(asked: list[dict[str, Any]]) -> None:
    assert "is given twice" in run("/mnt", "max-downloads=1", "max-downloads=2").stderr
    assert "uid 7 is given twice" in run("/mnt", "limit-uid=7=1MiB", "limit-uid=7=2MiB").stderr


def test_limits_as_options(tmp_path: Path) -> None:
    for value in (["7=1MiB", "8=2MiB/s"], {"7": "1MiB", "8": "2MiB/s"}):
        options = {"limit_uid": value, "download_limit": "3MiB/s"}
        config = load_mount_config("s3://b", str(tmp_path), options)
        assert config.limit_uid == {7: MIB, 8: 2 * MIB}
        assert config.download_limit == 3 * MIB
    with pytest.raises(UsageError, match=r"--limit-uid: .*UID=SIZE"):
        load_mount_config("s3://b", str(tmp_path), {"limit_uid": ("x",)})
    with pytest.raises(UsageError, match=r"--read-timeout: a timeout is at least 0\.1s"):
        load_mount_config("s3://b", str(tmp_path), {"read_timeout": "0"})


def options(origin: ResilientOrigin, limits: UidLimits) -> dict[str, LiveOption]:
    namespace: Any = SimpleNamespace(ttls=Ttls(1.0, 2.0, 3.0, 4.0, math.inf))
    readers = SimpleNamespace(readahead=MIB)
    prefetch: Any = SimpleNamespace(readers=readers, mode="order")
    return live_options(origin, limits, namespace, prefetch, SharedTier("s3://b"))


async def test_every_live_option_has_a_function_that_applies_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """tests/mount/test_supervisor.py shows that the next daemon gets each of them, too."""
    caplog.set_level(logging.INFO, logger="cachefs")  # restores the level that `debug` changes
    found = options(ResilientOrigin(MemoryOrigin(), Resilience()), UidLimits({}))
    assert found.keys() == set(LIVE)
    assert {name for name in LIVE if f"`{name}`" not in CONTROL} == set()
    for option in found.values():
        before = option.get()
        option.put(before)
        assert option.get() == before


async def test_the_daemon() -> None:
    origin = ResilientOrigin(MemoryOrigin(), Resilience())
    limits = UidLimits({7: MIB})
    present = options(origin, limits)
    of_origin = ("max_downloads", "download_limit", "limit_uid", "hedge")
    verb = SetRoutes({name: present[name] for name in of_origin}, AccessLog(), Path("/mnt"))
    reply = await verb.set({"max_downloads": 3, "limit_uid": {"8": 2 * MIB}})
    assert reply == {
        "before": {
            "max_downloads": 64,
            "download_limit": 0,
            "limit_uid": {"7": MIB},
            "hedge": False,
            "access_log": "off",
        },
        "after": {
            "max_downloads": 3,
            "download_limit": 0,
            "limit_uid": {"7": MIB, "8": 2 * MIB},
            "hedge": False,
            "access_log": "off",
        },
    }
    assert origin.max_downloads == 3
    await verb.set({"download_limit": 5 * MIB, "limit_uid": {"7": 0}})
    assert origin.download_limit == 5 * MIB
    assert limits.by_uid() == {8: 2 * MIB}
    await verb.set({"download_limit": 0})
    assert origin.download_limit is None
    for wrong in ({"max_downloads": None, "x": 1}, {"max_downloads": 0}, {"limit_uid": "x"}):
        with pytest.raises(CachefsError):
            await verb.set(wrong)
