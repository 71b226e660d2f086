"""What the cache is made of: `[[tier]]` tables, and the options that stand for them."""

import os
from pathlib import Path

import pytest

from cachefs.config import MountConfig, fields, load_mount_config, load_tier
from cachefs.errors import UsageError
from cachefs.types import Medium

GIB = 1 << 30


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cachefs.toml"


def load(file: Path, toml: str = "", **options: object) -> MountConfig:
    file.write_text(toml)
    return load_mount_config("s3://bucket/prefix", "/mnt/data", options, file)


def error_of(file: Path, toml: str, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(file, toml, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def tier(**changes: str) -> str:
    """A table; values as TOML writes them."""
    values = {"medium": '"SSD"', "path": '"/a"', "quota": '"1GiB"'} | changes
    return "[[tier]]\n" + "".join(f"{k} = {v}\n" for k, v in values.items() if v)


def test_the_options_alone_make_one_ssd_tier(file: Path) -> None:
    (tier,) = load(
        file, cache_dirs="/a:/b", cache_size="10GiB", cache_high="0.9", cache_low="0.8"
    ).tiers
    assert (tier.medium, tier.paths) == (Medium.SSD, (Path("/a"), Path("/b")))
    assert tier.quotas == (5 * GIB, 5 * GIB)
    assert (tier.high, tier.low, tier.free_space_ratio, tier.pin_limit) == (0.9, 0.8, 0.1, 0.8)


def test_mem_size_puts_a_tier_in_front(file: Path) -> None:
    config = load(file, mem_size="1GiB")
    memory, disks = config.tiers
    assert (memory.medium, memory.quotas) == (Medium.MEM, (GIB,))
    (place,) = memory.paths
    assert place.parent == Path(f"/dev/shm/cachefs-{os.geteuid()}")
    assert place.name == config.cache_dirs[0].name
    assert disks.medium is Medium.SSD
    assert load(file, mem_size="1GiB", mem_dir="/m").tiers[0].paths == (Path("/m"),)
    assert len(load(file, mem_size="0", mem_dir="/m").tiers) == 1


def test_tables_are_sorted_by_medium(file: Path) -> None:
    toml = (
        tier(medium='"HDD"', path='"/h"', quota='"8GiB"')
        + tier(path='"/s1"')
        + tier(medium='"mem"', path='"/m"', high="0.8", low='"70%"', free_space_ratio="0")
        + tier(path='"/s2"', pin_limit="0.4")
    )
    tiers = load(file, toml, cache_low="0.5", free_space_ratio="0.2", pin_limit="50%").tiers
    assert [t.paths[0].name for t in tiers] == ["m", "s1", "s2", "h"]
    assert [t.medium.name for t in tiers] == ["MEM", "SSD", "SSD", "HDD"]
    assert (tiers[0].high, tiers[0].low, tiers[0].free_space_ratio) == (0.8, 0.7, 0)
    assert (tiers[1].high, tiers[1].low, tiers[1].free_space_ratio) == (0.97, 0.5, 0.2)
    assert [t.pin_limit for t in tiers] == [0.5, 0.5, 0.4, 0.5]


@pytest.mark.parametrize("path", ['"/a:/b"', '"/a, /b"', '["/a", "/b"]'])
@pytest.mark.parametrize(
    ("quota", "quotas"),
    [
        ('"4GiB"', (2 * GIB, 2 * GIB)),
        ("4294967296", (2 * GIB, 2 * GIB)),
        ('"1GiB, 3GiB"', (GIB, 3 * GIB)),
        ('["1GiB", 3221225472]', (GIB, 3 * GIB)),
    ],
)
def test_a_quota_is_shared_or_one_for_each_path(
    file: Path, path: str, quota: str, quotas: tuple[int, ...]
) -> None:
    (made,) = load(file, tier(path=path, quota=quota)).tiers
    assert made.paths == (Path("/a"), Path("/b"))
    assert made.quotas == quotas


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (tier(quota='"lots"'), 'tier 1: quota: "lots" is not a size'),
        (tier() + tier(path='"/b"', high="7"), "tier 2: high: 7 is not a ratio"),
        (tier(medium='"NVME"'), 'tier 1: medium: "NVME" is not one of MEM, SSD, HDD'),
        (tier(medium="1"), "tier 1: medium: 1 is not one of"),
        (tier(medium=""), "tier 1: it has no medium; give it one of MEM"),
        (tier(path=""), "tier 1: it has no path"),
        (tier(quota=""), 'tier 1: it has no quota; give it a size such as "100GiB"'),
        (tier(path='""'), 'tier 1: path: "" is not a path'),
        (tier(path="[]"), "at least one"),
        (tier(path='"/a,/a/../a"'), "twice"),
        (tier(path="3"), "tier 1: path: 3 is not a path"),
        (tier(quota='"1MiB"'), 'tier 1: quota: "1MiB" is too small; the least is 64 MiB for each'),
        (tier(path='"/a:/b:/c"', quota='"128MiB"'), "too small"),
        (tier(quota="-1"), "-1 is not a size"),
        (tier(quota="true"), "True is not a size"),
        (tier(quota="[]"), "0 quotas for 1 paths"),
        (tier(quota='"1GiB,2GiB"'), "2 quotas for 1 paths; give one that they share, or one"),
        (tier(path='"/a:/b"', quota='["1GiB"]'), "1 quotas for 2 paths"),
        (tier(low="0.98"), "tier 1: low (0.98) must be above 0 and below high (0.97)"),
        (tier(mediumtype='"SSD"'), 'unknown key "mediumtype"; did you mean "medium"?'),
        (tier(quotaList='"1GiB"'), 'unknown key "quotaList"; did you mean "quota"?'),
        (tier(colour='"red"'), 'unknown key "colour"; known are medium, path, quota, high'),
        ("tier = 1", "write [[tier]], with two brackets"),
        ("tier = []", "write [[tier]], with two brackets"),
        ("tier = [1]", "tier 1: 1 is not a table; write [[tier]]"),
        ("[tier]\nquota = 1", "write [[tier]], with two brackets"),
        ("[[levels]]\n", "did you mean [[tier]], once for each medium?"),
        ("[tieredstore]\n", "did you mean [[tier]]"),
        (tier(path='"/mnt/data/x"'), "cache directory /mnt/data/x lies below the mountpoint"),
        (tier(path='"/a:/b"') + tier(path='"/c:/a"'), "/a stands in two tiers"),
        ("cache_high = 9\n" + tier(), "cache_high: 9 is not a ratio"),
        ("cache_size = 1e9\n" + tier(), "cache_size"),
        ("mem_dir = '/m'", "mem_dir needs mem_size"),
    ],
)
def test_nonsense_is_named_with_its_place(file: Path, toml: str, said: str) -> None:
    text = error_of(file, toml)
    assert str(file) in text
    assert said in text


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("cache_dirs", "/x", "cache_dir"),
        ("cache_size", "10GiB", "cache_size"),
        ("mem_size", "1GiB", "mem_size"),
        ("mem_dir", "/m", "mem_dir"),
    ],
)
def test_tables_and_options_do_not_mix(file: Path, option: str, value: str, name: str) -> None:
    text = error_of(file, tier(), **{option: value})
    assert f"{name} and [[tier]] both say what the cache is made of; use one or the other" in text


def test_the_memory_directory_must_be_another_one(file: Path) -> None:
    assert "two tiers" in error_of(file, "", cache_dirs="/x", mem_size="1GiB", mem_dir="/x")
    assert "below the mountpoint" in error_of(file, "", mem_size="1GiB", mem_dir="/mnt/data")


def test_a_tier_for_a_running_mount(file: Path) -> None:
    config = load(file, cache_low="0.5")
    made = load_tier(config, {"medium": "HDD", "path": ["/h,x"], "quota": GIB, "high": 0.9})
    assert (made.medium, made.paths, made.quotas) == (Medium.HDD, (Path("/h,x"),), (GIB,))
    assert (made.high, made.low) == (0.9, 0.5)
    for table, said in (
        ({"medium": "SSD", "path": "/a", "quota": 1}, "quota: 1 is too small"),
        ({"medium": "SSD", "path": "/a"}, "it has no quota"),
        ({"medium": "SSD", "path": "/mnt/data/a", "quota": GIB}, "below the mountpoint"),
        ({"medium": "SSD", "path": "/a", "quota": GIB, "low": 0.99}, "low (0.99)"),
    ):
        with pytest.raises(UsageError) as caught:
            load_tier(config, table)
        assert str(caught.value).startswith(said) or said in str(caught.value)


def test_a_high_mark_alone_moves_the_low_one(file: Path) -> None:
    (own,) = load(file, tier(high="0.9")).tiers
    assert (own.high, own.low) == (0.9, 0.8536)
    assert (
        load_tier(load(file), {"medium": "SSD", "path": "/b", "quota": GIB, "high": "50%"}).low
        < 0.5
    )
    assert load(file, tier(high="0.5"), cache_low="0.4").tiers[0].low == 0.4
    assert load(file, tier(high="0.5"), cache_high="0.8").tiers[0].low == 0.4742
    assert load(file, cache_high="0.9").tiers[0].low == 0.8536
    assert load(file).tiers[0].low == 0.92
    assert "below high" in error_of(file, tier(high="0.9", low="0.92"))
    assert "nonsense" in error_of(file, tier(high='"nonsense"'))


def test_another_users_directory_in_memory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_SHARED_MEMORY", tmp_path)
    usual = tmp_path / f"cachefs-{os.geteuid()}"
    assert fields.user_mem_home() == usual
    usual.symlink_to("/nowhere")  # anybody may do that
    first = fields.user_mem_home()
    assert first.parent == tmp_path
    assert first.name.startswith(f"{usual.name}-")
    assert fields.user_mem_home() != first, "nobody can foresee it"
    first.mkdir()
    assert fields.user_mem_home() == first, "the next daemon finds it"
    usual.unlink()
    usual.mkdir()
    assert fields.user_mem_home() == usual
