"""Newer versions of what was built, for upgrades: the same but for the version."""

import re
import subprocess
import zipfile
from pathlib import Path

VERSION = "99.0"


def newer_wheel(wheel: Path, directory: Path) -> Path:
    """Write a copy of cachefs's wheel with the newer version into `directory`."""
    old = wheel.name.split("-")[1]
    copy = directory / wheel.name.replace(f"-{old}-", f"-{VERSION}-")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(copy, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            if item.filename.endswith(("/METADATA", "cachefs/_version.py", "/RECORD")):
                data = data.replace(old.encode(), VERSION.encode())
                # Wrong sums in RECORD would make pip warn.
                data = re.sub(rb"^(\S+),sha256=[^,]+,\d+$", rb"\1,,", data, flags=re.MULTILINE)
            item.filename = item.filename.replace(f"cachefs-{old}.", f"cachefs-{VERSION}.")
            target.writestr(item, data)
    return copy


def newer_deb(deb: Path, directory: Path) -> Path:
    """Write a copy of the Debian package with the newer version into `directory`."""
    tree = directory / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", deb, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(
        re.sub(r"^Version: .*$", f"Version: {VERSION}", control.read_text(), flags=re.MULTILINE)
    )
    (package,) = tree.glob("usr/lib/cachefs/lib/python3*/dist-packages/cachefs")
    for compiled in package.glob("__pycache__/_version.*"):
        compiled.unlink()
    (package / "_version.py").write_text(f'__version__ = "{VERSION}"\n')
    copy = directory / f"cachefs_{VERSION}.deb"
    pack = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, copy]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    return copy
