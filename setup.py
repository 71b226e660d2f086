"""The compiled parts and the version; everything else is in pyproject.toml.

What can't be compiled is left out with a warning: without a compiler, or with a libfuse before
3.12, mounts do without the relay (`--data-path python`). Without the MD5 of several buffers, loads
use hashlib.
"""

import subprocess
from pathlib import Path

from setuptools import Extension, setup

_HOME = Path("src/cachefs/fuse/relay")
_SOURCES = sorted(map(str, _HOME.glob("*.c")))
_HEADERS = sorted(map(str, _HOME.glob("*.h")))
_OPTIONS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"]
"""Hidden: other libraries don't see these functions, and calls between the files are direct."""


def _flags(what: str) -> list[str]:
    """What pkg-config says, or what is true of most distributions."""
    try:
        asked = ["pkg-config", what, "fuse3"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ["-I/usr/include/fuse3"] if what == "--cflags" else ["-lfuse3"]


def _version() -> str:
    """The version, which is written into the package, too."""
    command = ["sh", "scripts/version", "--write"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


setup(
    version=_version(),
    ext_modules=[
        Extension(
            "cachefs.fuse.relay._relay",
            _SOURCES,
            depends=_HEADERS,
            extra_compile_args=[*_OPTIONS, *_flags("--cflags")],
            extra_link_args=_flags("--libs"),
            optional=True,
        ),
        Extension(
            "cachefs.origin.s3._md5",
            ["src/cachefs/origin/s3/md5.c"],
            extra_compile_args=_OPTIONS,
            optional=True,
        ),
    ]
)
