"""Make the data sets below `local` and in the bucket, when a workload first needs them."""

import random
import shutil
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from bench import rig
from bench.case import Bench

NAMES_PER_DIRECTORY, DIRECTORIES_PER_GROUP = 1_000, 10
VALUE_BYTES = 10_000
LMDB_NAME = "data.mdb"
_IMPORTER = Path(__file__).with_name("import_reader.py")


def make(bench: Bench, prefix: str) -> None:
    """Make one of `small`, `large`, `lmdb`, `packages`, `names`."""
    if prefix == "small":
        bench.small_files()
    elif prefix == "large":
        bench.large_file()
    else:
        directory = bench.local / prefix
        directory.mkdir(parents=True)
        {"lmdb": _lmdb, "packages": _packages, "names": _names}[prefix](bench, directory)
        rig.upload(
            bench.store,
            (
                (f"{prefix}/{path.relative_to(directory)}", path)
                for path in sorted(directory.rglob("*"))
                if path.is_file()
            ),
        )


def lmdb_records(bench: Bench) -> int:
    """Return the number of records of `VALUE_BYTES`; together a quarter of the large file's
    size."""
    return max(bench.scale.large_bytes // 4 // VALUE_BYTES, 100)


def _lmdb(bench: Bench, directory: Path) -> None:
    import lmdb

    count = lmdb_records(bench)
    bench.say(f"making and uploading an LMDB file of {count:,} records of {VALUE_BYTES} bytes")
    noise = random.Random("lmdb").randbytes(1 << 20)
    path = str(directory / LMDB_NAME)
    with (
        lmdb.open(path, subdir=False, map_size=count * VALUE_BYTES * 4) as database,
        database.begin(write=True) as transaction,
    ):
        for number in range(count):
            start = number * 7919 % (len(noise) - VALUE_BYTES)
            key = b"%08d" % number
            value = key + noise[start : start + VALUE_BYTES - len(key)]
            transaction.put(key, value, append=True)
    Path(path + "-lock").unlink()


def _packages(bench: Bench, directory: Path) -> None:
    """Copy moto and everything that it imports from this environment, and compile them."""
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-B", _IMPORTER, *_site_packages(), "--list"],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout.splitlines()  # fmt: skip
    for source in [Path(name) for name in listed] + _metadata(listed):
        if source.is_dir():
            shutil.copytree(
                source, directory / source.name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(source, directory / source.name)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode",
         "unchecked-hash", str(directory)],
        stdout=subprocess.DEVNULL, timeout=300, check=False,
    )  # fmt: skip
    files = sum(path.is_file() for path in directory.rglob("*"))
    bench.say(f"uploading Python packages, {files:,} files")


def _metadata(listed: list[str]) -> list[Path]:
    """Return the *.dist-info directories of the listed packages, which contain their versions."""
    tops = {Path(name).stem for name in listed}
    names = {
        name for top, names in packages_distributions().items() if top in tops for name in names
    }
    found = []
    for name in names:
        root = Path(str(distribution(name).locate_file("")))
        stem = f"{name.replace('-', '_')}-".lower()
        found += [path for path in root.glob("*.dist-info") if path.name.lower().startswith(stem)]
    return sorted(found)


def _site_packages() -> list[str]:
    import moto

    return [str(Path(moto.__file__).parent.parent)]


def _names(bench: Bench, directory: Path) -> None:
    count = bench.scale.names
    bench.say(f"uploading {count:,} small objects (some {count // 1500} s)")
    for first in range(0, count, NAMES_PER_DIRECTORY):
        group, place = divmod(first // NAMES_PER_DIRECTORY, DIRECTORIES_PER_GROUP)
        below = directory / f"g{group:03}" / f"d{place}"
        below.mkdir(parents=True)
        for number in range(min(NAMES_PER_DIRECTORY, count - first)):
            (below / f"{number:04}.jpg").write_bytes(b"0123456789abcdef")
