"""The daemon's log, as `cachefs mount` sets it up."""

import json
from pathlib import Path

from tests.mount.harness import Site


def test_json_in_a_rotated_file(site: Site, tmp_path: Path) -> None:
    (site.files / "file").write_text("content")
    site.log.write_text("x" * (64 << 10))
    site.log.chmod(0o640)
    site.mount("--log-format", "json", "--log-max-size", "64KiB")
    assert (site.mountpoint / "file").read_text() == "content"
    site.umount()
    assert (tmp_path / "log.1").read_text() == "x" * (64 << 10)
    assert site.log.stat().st_mode & 0o777 == 0o640, "as somebody has set it"
    records = [json.loads(line) for line in site.log.read_text().splitlines()]
    assert f"mounted on {site.mountpoint}" in [record["message"] for record in records]
    assert {record["level"] for record in records} == {"INFO"}


def test_others_cannot_read_it(site: Site) -> None:
    """Names of files stand there."""
    site.mount()
    assert site.log.stat().st_mode & 0o777 == 0o600
