"""`python -m bench.soak` does everything at once for ten minutes.

Eight readers compare every byte. The cache is too small for the data, files change at the origin,
load jobs run, page caches are dropped, and in the first third daemons are killed or replaced. The
results are wrong bytes, errors other than ESTALE (a file that was replaced during a read), and
whether memory and descriptors of daemon and supervisor have grown since the first third.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path

from bench import procfs, rig, sandbox
from bench.checking_reader import content
from bench.outlives import Readers, make_files

FILES = 1_500
READERS = 8
MINUTES = 10.0
GROWTH_BAR = 1.10
GROWTH_BAR_BYTES = 8 << 20
_SAMPLE_S = 5.0
_TTL = "2"


class Samples:
    """Memory and descriptors of the mount's processes over time."""

    def __init__(self, mount: rig.Mount) -> None:
        self._mount = mount
        self.by_process: dict[str, list[tuple[int, int]]] = {"daemon": [], "supervisor": []}

    def take(self) -> None:
        status = self._mount.status()
        for name, pid in (("daemon", status["pid"]), ("supervisor", status["supervisor_pid"])):
            memory = procfs.memory_bytes(pid)
            fds = len(os.listdir(f"/proc/{pid}/fd"))
            # Count only RssAnon: memory shared with the relay and pages of files are no leak.
            self.by_process[name].append((memory["RssAnon"], fds))

    def report(self) -> bool:
        """Print the growth. Return True if memory or descriptors have grown too much."""
        grown = False
        for name, samples in self.by_process.items():
            third = max(1, len(samples) // 3)
            early, late = samples[:third], samples[-third:]
            memory = [statistics.median(rss for rss, _ in part) for part in (early, late)]
            fds = [max(count for _, count in part) for part in (early, late)]
            grown |= memory[1] > max(memory[0] * GROWTH_BAR, memory[0] + GROWTH_BAR_BYTES)
            grown |= fds[1] > fds[0] * GROWTH_BAR + 8
            print(
                f"{name}: {memory[0] / 1e6:.1f} MB at first, {memory[1] / 1e6:.1f} MB at the end; "
                f"{fds[0]} and {fds[1]} descriptors at the most",
                flush=True,
            )
        return grown


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    sandbox.run("soak", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    source = directory / "source"
    make_files(source, FILES)
    options = ["--cache-size", "100MiB", "--free-space-ratio", "0.01", "--data-path", "relay"]
    options += ["--attr-ttl", _TTL, "--entry-ttl", _TTL, "--list-ttl", _TTL]
    mount = rig.Mount(directory / "mount", f"file://{source}", {}, None, options)
    with mount:
        readers = Readers(mount.path, FILES, READERS, drop=False)
        stop = threading.Event()
        replacer = threading.Thread(target=_replace_files, args=(source, stop))
        replacer.start()
        try:
            samples = _trouble(mount, arguments.minutes * 60)
        finally:
            stop.set()
            replacer.join()
        seen = readers.stop()
        status = mount.status()
    (tier,) = status["tiers"]
    missed = samples.report()
    errors = {name: count for name, count in seen.errors.items() if name != "ESTALE"}
    print(
        f"{len(seen.times):,} reads, {seen.wrong} wrong, errors {seen.errors or 'none'}, the "
        f"longest {seen.longest_s:.1f} s; {status['data_path']['restarts']} restarts, "
        f"{tier['evicted']:,} evictions (since the last), relay: {status['relay']}",
        flush=True,
    )
    return int(arguments.strict and bool(missed or seen.wrong or errors))


def _replace_files(source: Path, stop: threading.Event) -> None:
    """Replace ten files per second by another version with another size."""
    chance = random.Random(7)
    version = 0
    while not stop.wait(0.1):
        version += 1
        number = chance.randrange(FILES)
        new = source.parent / "new"
        new.write_bytes(content(number, version, chance.randrange(20_000, 180_000)))
        new.replace(source / str(number))


def _trouble(mount: rig.Mount, seconds: float) -> Samples:
    """Disturb the mount for `seconds` and return the samples after the last restart."""
    began = time.monotonic()
    samples = Samples(mount)
    wanted = mount.path.with_name("wanted")
    wanted.write_text("".join(f"{number}\n" for number in range(0, FILES, 5)))
    turn = 0
    while (passed_s := time.monotonic() - began) < seconds:
        turn += 1
        if passed_s < seconds / 3:
            if turn % 4 == 0:
                os.kill(mount.status()["pid"], signal.SIGKILL)
                time.sleep(3.0)
            elif turn % 4 == 2:
                mount.command("upgrade", str(mount.path))
        elif passed_s > seconds / 3 + 15:
            samples.take()
        if turn % 3 == 0:
            with contextlib.suppress(RuntimeError):  # files were evicted again, or replaced
                mount.command("load", "-f", str(wanted), "--mount", str(mount.path))
        if turn % 5 == 0 and rig.can_drop_caches():
            rig.drop_page_cache()
        time.sleep(_SAMPLE_S)
    return samples


if __name__ == "__main__":
    main()
