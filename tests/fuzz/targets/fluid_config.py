"""Fluid's config.json and MOUNT_OPTIONS (cli/thin_runtime/). The options are what follows the first
zero byte."""

from pathlib import Path

from cachefs.cli.thin_runtime.wanted import CACHE_DIR_VARIABLE, wanted_mounts
from cachefs.errors import CachefsError
from tests.fuzz.targets._support import check_text

_SECRETS = Path("/etc/fluid/secrets")
_PRIVATE = Path("/private")


def fuzz(data: bytes) -> None:
    content, _, words = data.partition(b"\0")
    environment = {
        "MOUNT_OPTIONS": words.decode("utf-8", "surrogateescape"),
        CACHE_DIR_VARIABLE: "/cache",
    }
    try:
        wanted = wanted_mounts(content, environment, _SECRETS, _PRIVATE)
    except CachefsError as error:
        check_text(error)
        return
    for place, mount in wanted.mounts.items():
        assert place.is_relative_to(wanted.target)
        assert ".." not in place.parts
        assert mount.secrets_dir.parent == _PRIVATE
        for file in mount.secrets.values():
            if file.is_link and file.text.startswith(f"{_SECRETS}/"):
                assert ".." not in Path(file.text).parts
