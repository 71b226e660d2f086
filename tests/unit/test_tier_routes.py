"""Changing the tiers of a running mount, with a cache that only takes notes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.cache.counters import TierCounters, TierStatus
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.config import TierConfig, load_mount_config
from cachefs.control.routes.tier import TierRoutes
from cachefs.daemon import tiers as daemon_tiers
from cachefs.errors import CacheDirError, CachefsError
from cachefs.types import Medium

MIB = 1 << 20


class FakeCache:
    def __init__(self, tiers: list[CacheDirectory]) -> None:
        self.tiers = {tier.paths.root: tier for tier in tiers}
        self.quotas = {tier.paths.root: tier.quota_bytes for tier in tiers}
        self.failure: Exception | None = None

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def resize_tier(self, path: Path, quota_bytes: int) -> None:
        self._fail()
        self.quotas[path] = quota_bytes

    async def add_tier(self, tier: CacheDirectory) -> None:
        self._fail()
        self.tiers[tier.paths.root] = tier
        self.quotas[tier.paths.root] = tier.quota_bytes

    async def remove_tier(self, path: Path) -> None:
        self._fail()
        del self.tiers[path], self.quotas[path]

    def status(self) -> list[TierStatus]:
        return [
            TierStatus(
                str(path), tier.medium, "normal", self.quotas[path], *[0] * 6, TierCounters()
            )
            for path, tier in self.tiers.items()
        ]


class House:
    """A mount with a directory in "memory" and one on "SSD"."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mem, self.ssd = root / "mem", root / "ssd"
        options = {
            "mem_dir": self.mem,
            "mem_size": "64MiB",
            "cache_dirs": [self.ssd],
            "cache_size": "64MiB",
            "cache_low": "0.5",
        }
        self.config = load_mount_config("s3://b", str(root / "mnt"), options)
        self.tiers = daemon_tiers.open_tiers("s3://b", *self.config.tiers)
        self.cache = FakeCache(self.tiers)
        home = daemon_tiers.home_of(self.config, self.tiers, root / "spare").root
        self.routes: Any = TierRoutes(
            self.cache,  # type: ignore[arg-type]
            self.config,
            lambda wanted: daemon_tiers.open_tiers("s3://b", wanted),
            self.tiers,
            home,
        )

    def paths(self) -> list[Path]:
        return [tier.paths.root for tier in self.tiers]

    def can_be_opened(self, path: Path) -> bool:
        """Nobody holds its lock."""
        try:
            CacheDirectory.open(path, 64 * MIB, "s3://b").close()
        except CacheDirError:
            return False
        return True


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for tier in house.tiers:
        tier.close()


async def test_resize(house: House) -> None:
    reply = await house.routes.resize({"path": f"{house.ssd}/", "quota_bytes": 128 * MIB})
    assert (reply["before"]["quota_bytes"], reply["after"]["quota_bytes"]) == (64 * MIB, 128 * MIB)
    assert house.cache.quotas[house.ssd] == 128 * MIB


async def test_add_and_remove(house: House) -> None:
    new = house.root / "new:one,two"
    reply = await house.routes.add(
        {"medium": "HDD", "path": str(new), "quota_bytes": 64 * MIB, "high": 0.75}
    )
    assert (reply["after"]["path"], reply["after"]["medium"]) == (str(new), "HDD")
    tier = house.cache.tiers[new]
    capacity_bytes = tier.slabs.capacity_bytes
    assert 62 * MIB <= capacity_bytes <= 64 * MIB
    assert tier.watermarks.high_bytes == capacity_bytes * 3 // 4
    assert tier.watermarks.low_bytes == capacity_bytes // 2  # the mount's
    assert house.paths() == [house.mem, house.ssd, new]
    assert not house.can_be_opened(new)
    reply = await house.routes.remove({"path": str(new)})
    assert reply["before"]["path"] == str(new)
    assert house.paths() == [house.mem, house.ssd]
    assert house.can_be_opened(new)


async def test_a_tier_that_the_cache_does_not_take_is_given_back(house: House) -> None:
    house.cache.failure = CacheDirError("no")
    with pytest.raises(CacheDirError, match="no"):
        await house.routes.add(
            {"medium": "SSD", "path": str(house.root / "n"), "quota_bytes": 64 * MIB}
        )
    assert house.paths() == [house.mem, house.ssd]
    assert house.can_be_opened(house.root / "n")


async def test_a_tier_that_the_cache_does_not_let_go_stays(house: House) -> None:
    house.cache.failure = CacheDirError("no")
    with pytest.raises(CacheDirError, match="no"):
        await house.routes.remove({"path": str(house.mem)})
    assert house.paths() == [house.mem, house.ssd]
    assert not house.can_be_opened(house.mem)


async def test_the_home_of_the_namespace_stays(house: House) -> None:
    with pytest.raises(CacheDirError, match=r"/ssd can't be removed while mounted: it holds"):
        await house.routes.remove({"path": str(house.ssd)})
    await house.routes.remove({"path": str(house.mem)})


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        ("resize", {}, "absolute path, not by None"),
        ("resize", {"path": "ssd", "quota_bytes": 1}, "absolute path"),
        ("resize", {"path": "/other", "quota_bytes": 1}, "/other is no tier of this mount; its"),
        ("resize", {"path": "{ssd}"}, "a quota is a number of bytes, not None"),
        ("resize", {"path": "{ssd}", "quota_bytes": True}, "not True"),
        ("resize", {"path": "{ssd}", "quota_bytes": 1 << 70}, "a quota is a number of bytes"),
        (
            "resize",
            {"path": "{ssd}", "quota_bytes": MIB},
            "1 MiB is too small; the least is 64 MiB",
        ),
        ("remove", {"path": "/other"}, "is no tier of this mount"),
        ("remove", {"path": 7}, "absolute path"),
        ("add", {"path": "{root}/n"}, "it has no medium"),
        ("add", {"path": "{root}/n", "medium": "TAPE", "quota_bytes": 1}, "not one of MEM"),
        ("add", {"path": "{root}/n", "medium": "SSD", "quota_bytes": 1}, "too small"),
        ("add", {"path": "n", "medium": "SSD", "quota_bytes": 64 * MIB}, "absolute path"),
        (
            "add",
            {"path": "{ssd}", "medium": "SSD", "quota_bytes": 64 * MIB},
            "a tier of this mount",
        ),
        ("add", {"path": "{root}/mnt/x", "medium": "SSD", "quota_bytes": 64 * MIB}, "mountpoint"),
        ("add", {"path": "/proc/x", "medium": "SSD", "quota_bytes": 64 * MIB}, "/proc/x"),
        ("add", {"path": "{root}/n", "colour": "red"}, "no argument colour"),
    ],
)
async def test_nonsense(house: House, verb: str, arguments: dict[str, Any], said: str) -> None:
    if isinstance(arguments.get("path"), str):
        path = arguments["path"].format(ssd=house.ssd, root=house.root)
        arguments = {**arguments, "path": path}
    quotas = dict(house.cache.quotas)
    with pytest.raises(CachefsError) as caught:
        await getattr(house.routes, verb)(arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert house.cache.quotas == quotas
    assert house.paths() == [house.mem, house.ssd]


def test_the_namespace_lives_on_a_disk_if_there_is_one(house: House) -> None:
    mem, ssd = house.tiers
    assert (mem.medium, ssd.medium) == (Medium.MEM, Medium.SSD)
    assert daemon_tiers.home_of(house.config, [mem, ssd], house.mem / "no") == ssd.paths


@pytest.mark.expect_log("names are kept in")
def test_names_go_into_memory_rather_than_into_another_tier(house: House, tmp_path: Path) -> None:
    mem, _ = house.tiers
    home = daemon_tiers.home_of(house.config, [mem], tmp_path / "spare")
    assert home.root == tmp_path / "spare"
    assert home.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.expect_log("the mount goes on without this tier")
def test_a_directory_that_can_not_be_used_is_done_without(tmp_path: Path) -> None:
    """While people use the mount; not when it is made."""
    options = {"cache_dirs": f"{tmp_path}/a:{tmp_path}/b", "cache_size": "256MiB"}
    config = load_mount_config("s3://b", str(tmp_path / "mnt"), options)
    daemon_tiers.close_all(daemon_tiers.open_tiers("s3://b", *config.tiers))
    (tmp_path / "a" / "cachefs.json").write_text("{")
    with pytest.raises(CacheDirError, match="can't be understood"):
        daemon_tiers.open_tiers("s3://b", *config.tiers)
    tiers = daemon_tiers.open_tiers("s3://b", *config.tiers, tolerant=True)
    assert [tier.paths.root for tier in tiers] == [tmp_path / "b"]
    daemon_tiers.close_all(tiers)


@pytest.mark.expect_log("the origin is asked again")
def test_a_damaged_namespace_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "namespace"
    daemon_tiers.open_names(path).close()
    data = bytearray((path / "data.mdb").read_bytes())
    data[:8192] = bytes(8192)
    (path / "data.mdb").write_bytes(data)
    daemon_tiers.open_names(path).close()
    assert (tmp_path / "namespace.bad" / "data.mdb").read_bytes() == data


def test_tiers_are_opened_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "foreign").touch()
    config = load_mount_config("s3://b", "/mnt/x", {"cache_dirs": [tmp_path / "a", tmp_path / "b"]})
    with pytest.raises(CacheDirError, match="holds other files"):
        daemon_tiers.open_tiers("s3://b", *config.tiers)
    CacheDirectory.open(tmp_path / "a", 64 * MIB, "s3://b").close()


@pytest.mark.parametrize("bad", ["file", "link", "open to all"])
def test_memory_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    home = tmp_path / "cachefs-uid"
    monkeypatch.setattr(daemon_tiers, "user_mem_home", lambda: home)
    config = load_mount_config("s3://b", "/mnt/x", {"mem_size": "64MiB", "mem_dir": home / "id"})
    memory: TierConfig = config.tiers[0]
    if bad == "file":
        home.touch()
    elif bad == "link":
        home.symlink_to(tmp_path)
    else:
        home.mkdir()
        home.chmod(0o777)
    with pytest.raises(CacheDirError, match=str(home)):
        daemon_tiers.open_tiers("s3://b", memory)
    home.rmdir() if home.is_dir() and not home.is_symlink() else home.unlink()
    for tier in daemon_tiers.open_tiers("s3://b", memory):
        tier.close()
    assert home.stat().st_mode & 0o777 == 0o700
    assert home.stat().st_uid == os.geteuid()
