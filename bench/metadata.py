"""Measure metadata: load a million names, carry them to another node, and mount a list of some."""

import contextlib
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

from bench import procfs, rig
from bench.case import Bench, discard
from bench.generated_s3 import BUCKET, GeneratedS3, path_in_tree
from bench.report import Row

FULL_COUNT, QUICK_COUNT, FLAT_COUNT = 1_000_000, 200_000, 100_000
LOAD_BAR, RSS_BAR_BYTES, BOTH_WAYS_BAR_S = 20_000, 300_000_000, 60.0
MANIFEST_BAR_S = 5.0
_LOOKED_AT = 500


def metadata(bench: Bench) -> list[Row]:
    """Measure with computed objects in directories of 1,000, but a real daemon, mount and find."""
    count = QUICK_COUNT if bench.scale.names < FLAT_COUNT else FULL_COUNT
    with GeneratedS3(count) as server:
        tree = f"{count:,} objects in {count // 1000:,} directories"
        rows = _tree(bench, server, tree)
        rows += _manifest(bench, server, tree)
    with GeneratedS3(FLAT_COUNT) as server:
        rows += _flat(bench, server)
    return rows


def _mount(bench: Bench, server: GeneratedS3, prefix: str, *options: str) -> rig.Mount:
    name = f"metadata-{prefix}-{random.getrandbits(32):08x}"
    sizes = ("--cache-size", "256MiB", "--free-space-ratio", "0.01")
    return rig.Mount(
        bench.directory / name,
        f"s3://{BUCKET}/{prefix}",
        server.environment,
        server.endpoint,
        [*sizes, "--list-ttl", "1d", "--entry-ttl", "1d", "--attr-ttl", "1d", *options],
    )


def _tree(bench: Bench, server: GeneratedS3, case: str) -> list[Row]:
    file = bench.directory / "metadata.parquet"
    with _mount(bench, server, "tree") as mount:
        bench.say(f"loading the metadata of {server.count:,} objects")
        rate, memory = _load(mount, server.count)
        bench.say("finding them")
        rows = [_at_least(case, "load --metadata", "1/s", rate, LOAD_BAR)]
        rows += _memory(case, "RSS after it", memory)
        rows += _found(case, mount, server)
        bench.say("exporting, and importing into another mount")
        began = time.monotonic()
        mount.command("metadata", "export", str(mount.path), str(file))
        export_s = time.monotonic() - began
    discard(mount)
    with _mount(bench, server, "tree") as other:
        began = time.monotonic()
        other.command("metadata", "import", str(other.path), str(file))
        import_s = time.monotonic() - began
        rows += [
            Row(case, "export", "s", export_s),
            Row(case, "import", "s", import_s),
            _at_most(case, "export and import", "s", export_s + import_s, BOTH_WAYS_BAR_S),
            Row(case, "the file", "MB", file.stat().st_size / 1e6),
        ]
        rows += _memory(case, "RSS after import", procfs.memory_bytes(other.status()["pid"]))
        rows += _found(f"{case}, imported", other, server)
    discard(other)
    return rows


def _flat(bench: Bench, server: GeneratedS3) -> list[Row]:
    case = f"{server.count:,} objects in one directory"
    bench.say(f"loading the metadata of {case}")
    with _mount(bench, server, "flat") as mount:
        rate, memory = _load(mount, server.count)
        rows = [Row(case, "load --metadata", "1/s", rate)]
        rows += _memory(case, "RSS after it", memory)
        rows += _found(case, mount, server)
    discard(mount)
    return rows


def _load(mount: rig.Mount, count: int) -> tuple[float, dict[str, int]]:
    """Return entries per second of the whole command, and the daemon's memory after it."""
    began = time.monotonic()
    said = mount.command("load", str(mount.path), "--metadata")
    seconds = time.monotonic() - began
    if f"{count:,} files" not in said:
        raise RuntimeError(f"load --metadata did not find all: {said}")
    return count / seconds, procfs.memory_bytes(mount.status()["pid"])


def _found(case: str, mount: rig.Mount, server: GeneratedS3) -> list[Row]:
    """Run `find`, which must stat every inode, and count the requests to the origin."""
    before = Counter(server.counts())
    began = time.monotonic()
    lines = subprocess.run(
        ["find", str(mount.path), "-type", "f", "-size", "+1", "-printf", "x"],
        capture_output=True,
        check=True,
        timeout=300,
    ).stdout
    seconds = time.monotonic() - began
    if len(lines) != server.count:
        raise RuntimeError(f"find found {len(lines):,} files instead of {server.count:,}")
    sent = sum((Counter(server.counts()) - before).values())
    memory = procfs.memory_bytes(mount.status()["pid"])
    return [
        Row(case, "find", "1/s", server.count / seconds),
        _at_most(case, "requests that it sends", "", sent, 0),
        *_memory(case, "RSS after find", memory),
    ]


def _manifest(bench: Bench, server: GeneratedS3, case: str) -> list[Row]:
    """Mount a plain list of a tenth of the objects."""
    chance = random.Random(7)
    listed = sorted(chance.sample(range(server.count), server.count // 10))
    file = bench.directory / "manifest.txt"
    file.write_text("".join(f"{path_in_tree(number)}\n" for number in listed))
    bench.say(f"mounting a list of {len(listed):,} of them")
    unlisted = chance.sample(sorted(set(range(server.count)) - set(listed)), _LOOKED_AT)
    before = Counter(server.counts())
    mount = _mount(bench, server, "tree", "--manifest", str(file))
    began = time.monotonic()
    with mount:
        seconds = time.monotonic() - began
        there = [_exists(mount.path / path_in_tree(n)) for n in listed[:_LOOKED_AT]]
        heads = server.counts()["HEAD"]
        absent = [_exists(mount.path / path_in_tree(n)) for n in unlisted]
        asked = server.counts()["HEAD"] - heads
        if not all(there) or any(absent):
            raise RuntimeError("the manifest does not show what it names, or shows more")
        sent = Counter(server.counts()) - before
        memory = procfs.memory_bytes(mount.status()["pid"])
    discard(mount)
    case = f"A list of {len(listed):,} paths of {case}"
    return [
        _at_most(case, "mount", "s", seconds, MANIFEST_BAR_S),
        _at_most(case, "LISTs", "", sent["LIST"], 0),
        _at_most(case, "requests for absent names", "", asked, 0),
        *_memory(case, "RSS", memory),
    ]


def _exists(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        path.stat()
        return True
    return False


def _at_least(case: str, figure: str, unit: str, value: float, bar: float) -> Row:
    return Row(case, figure, unit, value, bar=f">= {bar:,.0f}", passed=value >= bar)


def _at_most(case: str, figure: str, unit: str, value: float, bar: float) -> Row:
    return Row(case, figure, unit, value, bar=f"<= {bar:,.0f}", passed=value <= bar)


def _memory(case: str, figure: str, memory: dict[str, int]) -> list[Row]:
    return [
        _at_most(case, figure, "MB", memory["VmRSS"] / 1e6, RSS_BAR_BYTES / 1e6),
        Row(case, "  its own", "MB", memory["RssAnon"] / 1e6),
    ]
