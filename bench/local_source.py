"""`python -m bench.local_source` measures look-ups, listings and small changes at `file://`.

No answer is kept (all TTLs are 0), so each request reaches the source. A user who is not root makes
the changes, if root runs this. `--beside` compares with another version, in turns:

    python -m bench.local_source --beside /other/checkout/.venv/bin/cachefs
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench import rig, sandbox

ROUNDS = 3
_NAMES, _CHANGES = 1_000, 50
_UID = 54_321
_FRESH = ("--entry-ttl", "0", "--attr-ttl", "0", "--list-ttl", "0", "--negative-ttl", "0")

_WORK = """
import os, sys, time

point, names, changes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.chdir(point)

def timed(what, count, work):
    began = time.perf_counter()
    for number in range(count):
        work(number)
    print(what, (time.perf_counter() - began) / count, sep="\\t")

def write(name, data):
    with open(name, "wb", buffering=0) as file:
        file.write(data)

timed("look-up of a name", names, lambda n: os.stat(f"a/b/names/{n % 1000}"))
timed(f"listing of {names} names", 3, lambda n: os.listdir("a/b/names"))
timed("new file of 4 KB", changes, lambda n: write(f"w/{n}", bytes(range(256)) * 16))
timed("file replaced", changes, lambda n: write(f"w/{n}", bytes(range(255)) * 16))
timed("chmod", changes, lambda n: os.chmod(f"w/{n}", 0o640))
timed("rename", changes, lambda n: os.rename(f"w/{n}", f"w/m{n}"))
timed("unlink", changes, lambda n: os.unlink(f"w/m{n}"))
timed("mkdir", changes, lambda n: os.mkdir(f"w/d{n}"))
timed("rmdir", changes, lambda n: os.rmdir(f"w/d{n}"))
"""


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.local_source", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--beside", type=Path, metavar="PROGRAM", help="another cachefs")
    arguments = parser.parse_args()
    sandbox.run("local_source", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    programs = {"here": Path(rig.cachefs_command()[0])}
    if arguments.beside is not None:
        programs = {"beside": arguments.beside, **programs}
    for place in (directory, directory.parent):
        place.chmod(place.stat().st_mode | 0o055)
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in programs}
    for turn in range(arguments.rounds):
        for name, program in programs.items():
            base = directory / f"{name}-{turn}"
            for what, seconds in _measured(program, base).items():
                seen[name].setdefault(what, []).append(seconds)
    print(f"file://, medians of {arguments.rounds} in us: {', '.join(programs)}")
    for what in seen["here"]:
        medians = [statistics.median(each[what]) * 1e6 for each in seen.values()]
        ratio = f"  x {medians[1] / medians[0]:.2f}" if len(medians) == 2 else ""
        print(f"  {what:28}{''.join(f'{us:10.0f}' for us in medians)}{ratio}", flush=True)
    return 0


def _measured(program: Path, base: Path) -> dict[str, float]:
    """Mount a new source, and return the seconds of each step."""
    source, point = base / "source", base / "mnt"
    point.mkdir(parents=True)
    (source / "a/b/names").mkdir(parents=True)
    (source / "w").mkdir()
    (source / "w").chmod(0o777)
    for number in range(_NAMES):
        (source / "a/b/names" / str(number)).touch()
    mount = [str(program), "mount", "--rw", f"file://{source}", str(point), *_FRESH]
    mount += ["--cache-dir", str(base / "cache"), "--cache-size", "1GiB", "--metrics", "off"]
    mount += ["--free-space-ratio", "0.01", "--log-file", str(base / "log")]
    subprocess.run(mount, check=True)
    try:
        command = [sys.executable, "-c", _WORK, str(point), str(_NAMES), str(_CHANGES)]
        user = _UID if os.geteuid() == 0 else None
        groups = [] if user is not None else None
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, user=user, extra_groups=groups
        )
    finally:
        subprocess.run([str(program), "umount", str(point)], check=True)
    rows = (line.split("\t") for line in done.stdout.splitlines())
    return {what: float(seconds) for what, seconds in rows}


if __name__ == "__main__":
    main()
