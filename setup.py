"""The compiled, generated and fetched parts, and the version; the rest is in pyproject.toml.

What can't be compiled is left out with a warning: without a compiler, without xxhash.h, or with a
libfuse before 3.12, mounts do without the relay (`--data-path python`). A build fails without the
rest: libcurl 7.87 with its headers (Debian: libcurl4-openssl-dev), the files of `scripts/fetch`,
and the messages of the CSI specification.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup

_CSI = "src/cachefs/csi/spec"
_HOME = Path("src/cachefs/fuse/relay")
_HTTP = Path("src/cachefs/origin/http")
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


def _run(*command: str) -> None:
    """Run a Python program. A failure ends the build after the lines that the program printed."""
    if subprocess.run([sys.executable, *command], check=False).returncode:
        sys.exit(f"error: '{' '.join(command)}' failed; see the lines above")


# Now, because setuptools soon looks at which files are there.
_run("scripts/fetch", "uplot")
_run(
    "-m", "grpc_tools.protoc", "-I", _CSI, f"--python_out={_CSI}", f"--pyi_out={_CSI}", "csi.proto"
)
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
            "cachefs.origin.http._engine",
            sorted(map(str, _HTTP.glob("*.c"))),
            depends=sorted(map(str, _HTTP.glob("*.h"))),
            extra_compile_args=_OPTIONS,
            libraries=["curl"],
        ),
    ],
)
