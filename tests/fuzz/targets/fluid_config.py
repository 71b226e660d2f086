"""Fluid's config.json and MOUNT_OPTIONS (cli/thin_runtime/). The options are what follows the first
zero byte."""

from pathlib import Path

from cachefs.cli.thin_runtime.wanted import CACHE_DIR_VARIABLE, wanted_mounts
from cachefs.errors import CachefsError
from tests.fuzz.targets._support import check_text

_SECRETS = Path("/etc/fluid/secrets")
_PRIVATE = Path("/private")

GROWING = {
    "white space": lambda count: b" " * count,
    "one text": lambda count: b'{"targetPath":"' + b"x" * count + b'","mounts":[]}',
    "brackets": lambda count: b"[" * count,
    "numbers": lambda count: b'{"mounts":[' + b"1," * (count // 2) + b"1]}",
    "mounts": lambda count: (
        b'{"targetPath":"/t/f","mounts":['
        + b",".join(b'{"mountPoint":"file:///a","name":"n%d"}' % n for n in range(count // 45))
        + b"]}"
    ),
    "a deep path": lambda count: (
        b'{"targetPath":"/t/f","mounts":[{"mountPoint":"file:///a","path":"'
        + b"a/" * (count // 2)
        + b'","name":"n"}]}'
    ),
    "options": lambda count: b'{"mounts":[],"targetPath":"/t/f"}\0' + b"a=1," * (count // 4),
}
"""Inputs of about so many bytes."""


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
