"""A configuration on its way to another process, of this version or of another."""

import json
import math
from pathlib import Path

import pytest

from cachefs.config import from_json, load_mount_config, to_json
from cachefs.errors import UsageError

OPTIONS: list[dict[str, object]] = [
    {},
    {"cache_dirs": "/a:/b", "cache_size": "1TiB", "mem_size": "1GiB", "mem_dir": "/dev/shm/x"},
    {"squash": "12:34", "file_mode": "640", "dir_mode": "750"},
    {"uid": "7", "gid": 8, "allow_other": False, "limit_uid": ("7=1MiB", "8=0")},
    {"attr_ttl": "indefinite", "stale_if_error": 0, "scrub_interval": "7d"},
    {"data_path": "relay", "foreground": True, "log_file": "/log", "hedge": True},
    {"manifest": "s3://bucket/list", "credentials_dir": "/run/secrets", "ca_file": "/etc/ca.pem"},
    {
        "cache_high": 0.95,
        "tier_tables": [
            {"medium": "MEM", "path": "/dev/shm/x", "quota": "1GiB", "low": 0.5},
            {"medium": "SSD", "path": ["/a", "/b"], "quota": "1TiB,2TiB"},
        ],
    },
]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_arrives_as_it_was(options: dict[str, object]) -> None:
    config = load_mount_config("s3://bucket/a prefix", "/mnt", options)
    arrived = from_json(to_json(config))
    assert arrived == config
    assert arrived.given == config.given
    assert arrived.tiers == config.tiers


def test_relative_paths_stay_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = to_json(load_mount_config("s3://bucket", "/mnt", {"cache_dirs": "here"}))
    monkeypatch.chdir("/")
    assert from_json(text).cache_dirs == (tmp_path / "here",)


@pytest.mark.expect_log("does not know the option teleport; it is left out")
@pytest.mark.expect_log("does not know the option colour; it is left out")
def test_options_of_another_version_are_left_out() -> None:
    values = json.loads(to_json(load_mount_config("s3://bucket", "/mnt", OPTIONS[-1])))
    values["teleport"] = True
    values["tier_tables"][0]["colour"] = "red"
    assert from_json(json.dumps(values)) == load_mount_config("s3://bucket", "/mnt", OPTIONS[-1])


def test_values_that_this_version_does_not_take_are_refused() -> None:
    text = '{"source": "s3://bucket", "mountpoint": "/mnt", "data_path": "quantum"}'
    with pytest.raises(UsageError, match="data_path: "):
        from_json(text)


def test_infinity_is_text_too() -> None:
    config = load_mount_config("s3://bucket", "/mnt", {"attr_ttl": "indefinite"})
    assert from_json(to_json(config)).attr_ttl == math.inf
