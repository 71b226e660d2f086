"""The start of a mount, before the kernel has a part in it."""

from collections.abc import Callable
from pathlib import Path

import trio

from cachefs.config import load_mount_config
from cachefs.daemon.mount import RunningMount
from cachefs.daemon.parts import Opened, build_namespace
from cachefs.daemon.tiers import close_all, home_of, open_tiers
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.systemd_notify import NOBODY
from cachefs.types import DataPath, DataPathName
from tests.full_database import FullDatabase
from tests.memory_origin import MemoryOrigin


async def test_a_namespace_that_can_not_be_written_is_told_at_the_start(
    tmp_path: Path,
    nursery: trio.Nursery,
    full_database: FullDatabase,
    expect_log: Callable[[str], None],
) -> None:
    """No inode number is reserved, so only names that are known can be shown."""
    expect_log("can't write the database")
    expect_log("names that are not known yet give EIO until it can; free some space on the disk of")
    options = {"cache_dirs": (tmp_path / "cache",), "cache_size": "256MiB"}
    config = load_mount_config("file:///data", "/mnt/m", options)
    origin = ResilientOrigin(MemoryOrigin(), Resilience())
    tiers = open_tiers(origin.identity, *config.tiers)
    home = home_of(config, tiers, tmp_path / "spare")
    opened = Opened(config, origin, tiers, home, None, None, DataPath(DataPathName.PYTHON), None)
    mount = RunningMount(opened, NOBODY)
    try:
        namespace = build_namespace(opened, mount._base, nursery)
        full_database.is_full = True
        await mount._open(namespace, nursery)
    finally:
        full_database.is_full = False
        await mount._base.cache.aclose()
        mount._base.db.close()
        close_all(tiers)
