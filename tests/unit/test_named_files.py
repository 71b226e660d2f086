"""Files that an operator names: FIFOs and devices never wait, and each has a bound."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.cli import load
from cachefs.cli.files.metadata_file import MetadataReader
from cachefs.cli.mounting.environment_file import read_variables
from cachefs.config import load_mount_config
from cachefs.config.load import load_table_in, mountpoint_in
from cachefs.daemon.settings import shared_secret
from cachefs.errors import CachefsError, UsageError
from cachefs.log import open_log_file
from cachefs.manifest.fetch import digest_of
from cachefs.manifest.files import read_manifest
from cachefs.manifest.writer import replacing
from cachefs.origin.hdfs.config import read_site
from cachefs.origin.s3.config import check_ca_file


def _metadata(file: Path) -> None:
    with MetadataReader.open(file):
        pass


def _anything(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


_READERS: dict[str, Callable[[Path], object]] = {
    "c.toml": lambda file: load_mount_config("s3://b", "/mnt", {}, file),
    "d.toml": mountpoint_in,
    "e.toml": load_table_in,
    "x.env": lambda file: read_variables(file.with_suffix(".toml")),
    "manifest": lambda file: list(read_manifest(file, "m", str)),
    "digest": lambda file: digest_of(file, "m"),
    "list": lambda file: load._opened(str(file)),
    "metadata": _metadata,
    "secret": lambda file: shared_secret(_anything(shared_secret_file=file)),
    "ca.pem": lambda file: check_ca_file(_anything(ca_file=str(file))),
    "log": open_log_file,
    "core-site.xml": lambda file: read_site(),
}


@pytest.mark.parametrize("name", _READERS)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_no_reader_waits(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    if kind == "FIFO":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    began_s = time.monotonic()
    with pytest.raises((CachefsError, OSError), match=f"is a {kind}, not a regular file"):
        _READERS[name](tmp_path / name)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 20_000) + " = 1",
        ".".join(['"a b"'] * 20_000) + " = 1",
        "[" + ". ".join(["'a'"] * 20_000) + "]",
        "x = {" + " .\ta" * 40 + " = 1}",
    ],
)
def test_a_deep_key_does_not_take_long(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    began_s = time.monotonic()
    with pytest.raises(UsageError, match="too many parts"):
        mountpoint_in(file)
    assert time.monotonic() - began_s < 1


def test_a_long_file_is_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UsageError, match="more than 1"):
        mountpoint_in(file)


def test_points_in_texts_are_no_parts_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    points = "." * 100
    file.write_text(
        f'# it{points}\nmountpoint = "/mnt{points}" # \'\n'
        f'[load]\npaths = [\'a{points}\', "b\\"{points}",\n'
        f' \'\'\'x\n{points}\'\'\', """y\\"""\\"\n{points}""""]\nz = [{", ".join(["1.5"] * 90)}]\n'
    )
    assert mountpoint_in(file) == Path(f"/mnt{points}")
    assert len(load_table_in(file)["paths"]) == 4


@pytest.mark.root
def test_a_file_is_replaced_in_the_directory_that_was_named(tmp_path: Path) -> None:
    """Another user exchanges the directory while the file is written."""
    evil, outside = tmp_path / "evil", tmp_path / "outside"
    (evil / "d").mkdir(parents=True)
    outside.mkdir()
    (outside / "passwd").write_text("real")
    with replacing(evil / "d" / "passwd") as stream:
        stream.write(b"new")
        (evil / "d").rename(evil / "e")
        (evil / "d").symlink_to(outside)
    assert (outside / "passwd").read_text() == "real"
    assert (evil / "e" / "passwd").read_bytes() == b"new"
    os.chown(evil / "d", 2001, 2001, follow_symlinks=False)
    with pytest.raises(OSError, match="link of uid 2001"), replacing(evil / "d" / "passwd"):
        pass
