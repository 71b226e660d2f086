"""Sources that need libcurl say in one line that this machine lacks it; the others do without."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_OPEN = """
import sys
from cachefs.errors import UsageError
from cachefs.origin.open_origin import OriginOptions, open_origin
for url in sys.argv[1:]:
    try:
        open_origin(url, OriginOptions(endpoint="https://h", anonymous=True, region="r"))
        print("opened")
    except UsageError as error:
        print(error)
"""
_SHIM = """
#include <curl/curl.h>
#include <stdlib.h>
curl_version_info_data *curl_version_info(CURLversion version) {
    static curl_version_info_data told;
    (void)version;
    told.version = "1.2.3";
    told.version_num = atoi(getenv("SHIM_NUMBER"));
    told.ssl_version = getenv("SHIM_TLS");
    told.features = atoi(getenv("SHIM_FEATURES"));
    return &told;
}
"""
_OLD, _NEW = str(7 << 16 | 81 << 8), str(8 << 16)
_LOOKS_UP_NAMES_ALONE = str(1 << 7)


def opened(urls: list[str], environment: dict[str, str]) -> list[str]:
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    done = subprocess.run(
        [*command, sys.executable, "-c", _OPEN, *urls],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that tells of another libcurl."""
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(built)]
    subprocess.run(compiler, input=_SHIM, text=True, check=True)
    return built


def test_a_machine_without_libcurl(tmp_path: Path) -> None:
    (tmp_path / "libcurl.so.4").write_text("no library")
    found = opened(["s3://b", "oss://b", f"file://{tmp_path}"], {"LD_LIBRARY_PATH": str(tmp_path)})
    assert found[2:] == ["opened"]
    for scheme, line in zip(("s3", "oss"), found, strict=False):
        assert line.startswith(
            f"{scheme}:// can't be opened: libcurl 7.87 or newer, with OpenSSL, "
        )
        assert line.endswith(": apt-get install libcurl4 (Debian 13: libcurl4t64)")
        assert "libcurl.so.4: file too short" in line


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "tls", "features", "line"),
    [
        (_OLD, "OpenSSL/3.0.2", _LOOKS_UP_NAMES_ALONE, r"\(there is libcurl 1\.2\.3\)"),
        (_NEW, "GnuTLS/3.7.3", _LOOKS_UP_NAMES_ALONE, r"\(there is libcurl with GnuTLS/3\.7\.3\)"),
        (_NEW, "OpenSSL/3.0.2", "0", "blocks while it looks up names"),
        (_NEW, "OpenSSL/3.0.2", _LOOKS_UP_NAMES_ALONE, "^opened$"),
    ],
    ids=["old", "other_tls", "blocks", "right"],
)
def test_another_libcurl(shim: Path, number: str, tls: str, features: str, line: str) -> None:
    told = {"SHIM_NUMBER": number, "SHIM_TLS": tls, "SHIM_FEATURES": features}
    (found,) = opened(["s3://b"], {"LD_PRELOAD": str(shim), **told})
    assert re.search(line, found), found
