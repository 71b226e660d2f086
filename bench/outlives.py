"""`python -m bench.outlives` measures the effect on readers when the daemon dies or stands still.

First, eight readers compare every byte while the daemon is killed (SIGKILL) 20 times. The results
are errors, wrong bytes, and the longest read. Then one reader reads cached files while the daemon
is stopped for three seconds (SIGSTOP, which stops more than a thread that holds the GIL does).
Then a keeper holds the mount, and all its processes are replaced under four readers, as in an
update of a container: after SIGTERM and after SIGKILL in turns.
"""

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import rig, sandbox
from bench.checking_reader import content

FILES = 400
READERS = 8
KILLS = 20
BETWEEN_S = 1.5
STUCK_S = 3.0
PAUSE_BAR_S = 2.0
STUCK_P99_BAR_S = 0.005
REPLACED_READERS = 4
REPLACED_PAUSE_BAR_S = 3.0
_SCRIPT = Path(__file__).with_name("checking_reader.py")


class Seen(NamedTuple):
    """The results of all readers together. `times` has the begin and the duration of each read in
    seconds."""

    times: list[tuple[float, float]]
    wrong: int
    errors: dict[str, int]

    @property
    def longest_s(self) -> float:
        return max(lasted_s for _, lasted_s in self.times)


class Readers:
    """Processes that read until `stop` collects their results."""

    def __init__(self, root: Path, files: int, count: int, drop: bool) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-E", _SCRIPT, root, str(files), str(seed), str(int(drop))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(count)
        ]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    def stop(self) -> Seen:
        """End the readers and return their results. Raises `RuntimeError` if a reader failed."""
        times: list[tuple[float, float]] = []
        wrong, errors = 0, dict[str, int]()
        for process in self._processes:
            said, _ = process.communicate("", timeout=120)
            if process.returncode:
                raise RuntimeError(f"a reader ended with {process.returncode}")
            found: dict[str, Any] = json.loads(said)
            times += [(began, lasted) for began, lasted in found["times"]]
            wrong += len(found["wrong"])
            for name, number in found["errors"].items():
                errors[name] = errors.get(name, 0) + number
        return Seen(times, wrong, errors)


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.outlives", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--replacements", type=int, default=10)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    sandbox.run("outlives", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    make_files(directory / "source", FILES)
    options = ["--cache-size", "1GiB", "--free-space-ratio", "0.01", "--data-path", "relay"]
    mount = rig.Mount(directory / "mount", f"file://{directory}/source", {}, None, options)
    with mount:
        _have_it_served(mount)
        missed = _kill_again_and_again(mount, arguments.kills)
        missed |= _be_stuck(mount)
    missed |= _replace_again_and_again(directory, options, arguments.replacements)
    return int(arguments.strict and missed)


def make_files(directory: Path, count: int) -> None:
    """Make `count` files of 20 to 180 KB."""
    directory.mkdir()
    for number in range(count):
        size_bytes = 20_000 + number * 7_919 % 160_000
        (directory / str(number)).write_bytes(content(number, 0, size_bytes))


def _have_it_served(mount: rig.Mount) -> None:
    """Read every file several times, so that all are cached and published to the relay."""
    for _ in range(3):
        for number in range(FILES):
            path = mount.path / str(number)
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            path.read_bytes()
        time.sleep(1)


def _kill_again_and_again(mount: rig.Mount, kills: int) -> bool:
    readers = Readers(mount.path, FILES, READERS, drop=True)
    for _ in range(kills):
        time.sleep(BETWEEN_S)
        os.kill(_daemon(mount), signal.SIGKILL)
    time.sleep(BETWEEN_S)
    seen = readers.stop()
    restarts = mount.status()["data_path"]["restarts"]
    print(
        f"{restarts} daemons killed under {READERS} readers: {len(seen.times):,} reads, "
        f"{sum(seen.errors.values())} errors {seen.errors or ''}, {seen.wrong} wrong, the longest "
        f"{seen.longest_s:.2f} s (bar {PAUSE_BAR_S:.0f} s)",
        flush=True,
    )
    return bool(seen.errors or seen.wrong or seen.longest_s > PAUSE_BAR_S or restarts < kills)


def _daemon(mount: rig.Mount) -> int:
    """Return the process id of the current daemon. Waits, because there may be none for a
    moment."""
    for _ in range(100):
        try:
            pid = mount.status()["pid"]
        except RuntimeError:
            pid = None
        if pid is not None:
            return int(pid)
        time.sleep(0.1)
    raise RuntimeError("no daemon came back within some 30 s")


def _be_stuck(mount: rig.Mount) -> bool:
    _have_it_served(mount)
    pid = _daemon(mount)
    readers = Readers(mount.path, FILES, 1, drop=True)
    time.sleep(1.0)
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(STUCK_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    ended = time.monotonic()
    seen = readers.stop()
    during = [lasted for at, lasted in seen.times if began <= at < ended]
    before = [lasted for at, lasted in seen.times if at < began]
    p99_s = percentile(during, 0.99)
    print(
        f"stopped for {STUCK_S:.0f} s under a reader of cached files: {len(during):,} reads, "
        f"{sum(seen.errors.values())} errors, {seen.wrong} wrong, p99 {p99_s * 1e3:.2f} ms (bar "
        f"{STUCK_P99_BAR_S * 1e3:.0f} ms; before it {percentile(before, 0.99) * 1e3:.2f} ms), "
        f"median {statistics.median(during) * 1e3:.2f} ms",
        flush=True,
    )
    return bool(seen.errors or seen.wrong or p99_s > STUCK_P99_BAR_S)


def _replace_again_and_again(directory: Path, options: Sequence[str], count: int) -> bool:
    socket = directory / "keeper"
    options = [*options, "--keeper", str(socket)]
    mount = rig.Mount(directory / "kept", f"file://{directory}/source", {}, None, options)
    command = [*rig.cachefs_command(), "keeper", "--socket", str(socket)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as keeper:
        try:
            while not socket.exists():
                time.sleep(0.01)
            with mount:
                return _replace(mount, count)
        finally:
            keeper.terminate()


def _replace(mount: rig.Mount, count: int) -> bool:
    """Replace all processes of the mount, while readers read. No other process comes in between, so
    the pauses are those of a container that is there at once."""
    _have_it_served(mount)
    readers = Readers(mount.path, FILES, REPLACED_READERS, drop=True)
    for turn in range(count):
        time.sleep(BETWEEN_S)
        status = mount.status()
        supervisor = int(status["supervisor_pid"])
        ended = os.pidfd_open(supervisor)
        if turn % 2:
            os.kill(int(status["pid"]), signal.SIGKILL)
        os.kill(supervisor, signal.SIGKILL if turn % 2 else signal.SIGTERM)
        select.select([ended], [], [])
        os.close(ended)
        mount.mount()
    time.sleep(BETWEEN_S)
    seen = readers.stop()
    print(
        f"all processes replaced {count} times under {REPLACED_READERS} readers: "
        f"{len(seen.times):,} reads, {sum(seen.errors.values())} errors {seen.errors or ''}, "
        f"{seen.wrong} wrong, the longest {seen.longest_s:.2f} s (bar "
        f"{REPLACED_PAUSE_BAR_S:.0f} s)",
        flush=True,
    )
    return bool(seen.errors or seen.wrong or seen.longest_s > REPLACED_PAUSE_BAR_S)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile `share` (0 to 1) of `values`, which must not be empty."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
