"""`python -m bench.starts` measures how long starts and ends take: mount, umount, the next daemon.

For a local directory and for S3 (computed objects), with a warm cache, it takes the time of
`cachefs mount` and `umount`, from SIGKILL of the daemon to the first answer of the next one, and
the CPU time of that one until then. `--beside` compares with another version, in turns:

    python -m bench.starts --beside /other/checkout/.venv/bin/cachefs

Compile both (`python -m compileall -q src`): else each start compiles all modules.
"""

import argparse
import contextlib
import json
import os
import resource
import shlex
import signal
import statistics
import subprocess
import time
from pathlib import Path

from bench import rig, sandbox
from bench.generated_s3 import BUCKET, GeneratedS3

ROUNDS = 9
_ANSWER_S = 60.0
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED of Linux: in a clock's number, that of a whole process."""

Samples = dict[str, list[float]]


class Starts:
    """One version's mount of one source, and what was measured of it, in seconds."""

    def __init__(
        self, program: Path, base: Path, source: str, environment: dict[str, str], options: str
    ) -> None:
        self.seen: Samples = {}
        self._program = str(program)
        self._place = base / "mnt"
        self._environment = {**os.environ, **environment}
        self._place.mkdir(parents=True)
        self._mount = [
            *("mount", source, str(self._place), "--cache-dir", str(base / "cache")),
            *("--log-file", str(base / "log"), "--cache-size", "1GiB"),
            *("--free-space-ratio", "0.01", "--metrics", "off", *shlex.split(options)),
        ]

    def warm_up(self) -> None:
        """Have names and a file in the cache, and all modules in the page cache."""
        self._call(self._mount)
        for entry in sorted(self._place.iterdir())[:3]:
            if entry.is_file():
                entry.read_bytes()
        self._call(["umount", str(self._place)])

    def measure(self) -> None:
        """Mount, replace the daemon, and unmount, once."""
        self._timed("mount", self._mount)
        self._timed("status", ["status"])
        self._kill()
        self._timed("umount", ["umount", str(self._place)])
        self._timed("--help", ["--help"])

    def _kill(self) -> None:
        (status,) = (
            each
            for each in json.loads(self._call(["status", "--json"]))
            if each["mountpoint"] == str(self._place)
        )
        pid, supervisor = status["pid"], _parent(status["pid"])
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while _parent(pid) == supervisor:
            time.sleep(0.001)
        _await_answer(self._place)
        self._note("SIGKILL to the first answer", time.monotonic() - began)
        (daemon,) = _children(supervisor)
        self._note(
            "CPU of a daemon until it serves", time.clock_gettime((~daemon << 3) | _CPU_CLOCK)
        )

    def _timed(self, what: str, arguments: list[str]) -> None:
        began, cpu_s = time.monotonic(), _children_cpu_s()
        self._call(arguments)
        self._note(what, time.monotonic() - began)
        self._note(f"{what}: CPU of the command", _children_cpu_s() - cpu_s)

    def _call(self, arguments: list[str]) -> str:
        return subprocess.run(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_ANSWER_S,
        ).stdout

    def _note(self, what: str, seconds: float) -> None:
        self.seen.setdefault(what, []).append(seconds)


def _parent(pid: int) -> int | None:
    """Return the parent of a process; None if it has ended."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return None if state in "ZX" else int(parent)
    return None


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _await_answer(place: Path) -> None:
    """Return when the daemon answers. Before Linux 6.9 it may first fail a request."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        try:
            os.statvfs(place)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.starts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--beside", type=Path, metavar="PROGRAM", help="another cachefs")
    parser.add_argument("--options", default="", help="more options of cachefs mount, as one word")
    arguments = parser.parse_args()
    sandbox.run("starts", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    programs = {"here": Path(rig.cachefs_command()[0])}
    if arguments.beside is not None:
        programs = {"beside": arguments.beside, **programs}
    source = directory / "source"
    source.mkdir()
    for number in range(100):
        (source / str(number)).write_bytes(os.urandom(50_000))
    with GeneratedS3(1_000) as server:
        s3 = {**server.environment, "AWS_ENDPOINT_URL": server.endpoint}
        for url, environment in ((f"file://{source}", {}), (f"s3://{BUCKET}/flat", s3)):
            scheme = url.partition(":")[0]

            def starts(
                name: str, url: str = url, environment: dict[str, str] = environment
            ) -> Starts:
                base = directory / f"{name}-{url.partition(':')[0]}"
                return Starts(programs[name], base, url, environment, arguments.options)

            _compare(scheme, {name: starts(name) for name in programs}, arguments.rounds)
    return 0


def _compare(scheme: str, versions: dict[str, Starts], rounds: int) -> None:
    """Measure in turns, and print the medians."""
    for version in versions.values():
        version.warm_up()
    for _ in range(rounds):
        for version in versions.values():
            version.measure()
    print(f"{scheme}://, medians of {rounds} in ms: {', '.join(versions)}")
    for what in next(iter(versions.values())).seen:
        medians = (statistics.median(each.seen[what]) * 1e3 for each in versions.values())
        print(f"  {what:36}{''.join(f'{ms:8.0f}' for ms in medians)}", flush=True)


if __name__ == "__main__":
    main()
