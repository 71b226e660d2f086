"""The compiled part; everything else is in pyproject.toml.

Without a compiler, or with a libfuse before 3.12, it is left out with a warning: mounts then do
without the relay (`--data-path python`).
"""

import subprocess

from setuptools import Extension, setup

_HOME = "src/cachefs/fuse/relay"
_SOURCES = ("module", "reads", "relay", "sums", "sums_avx2", "table", "waiting")
_HEADERS = ("reads", "relay", "sums", "table", "waiting", "xxhash")


def _flags(what: str) -> list[str]:
    """What pkg-config says, or what is true of most distributions."""
    try:
        asked = ["pkg-config", what, "fuse3"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ["-I/usr/include/fuse3"] if what == "--cflags" else ["-lfuse3"]


setup(
    ext_modules=[
        Extension(
            "cachefs.fuse.relay._relay",
            [f"{_HOME}/{name}.c" for name in _SOURCES],
            depends=[f"{_HOME}/{name}.h" for name in _HEADERS],
            extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", *_flags("--cflags")],
            extra_link_args=_flags("--libs"),
            optional=True,
        )
    ]
)
