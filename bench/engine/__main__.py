"""`python -m bench.engine PROGRAM` measures cache engine and namespace without kernel and network.

hit_ratio   the hit ratio of each eviction policy on training reads and on other reads
space       the share of the disk space with data, also after the mix of sizes has changed
scale       4 million cached blocks: start, memory, look-ups
admission   the cost of storing a fetched block
look_ups    the time to look up the version of a known file
md5         the speed at which a load compares files with their ETags
quota       bytes on disk while the quota changes; hits while evicting
sick        hits on one disk while another fails, is full, or takes two seconds
shared      computes what a shared tier does with 24 to 500 nodes, from measured figures
"""

import argparse
import gc
import importlib
import os
import sys
import time
from pathlib import Path

from bench import sandbox

PROGRAMS = {
    "hit_ratio": "/dev/shm",
    "space": "/dev/shm",
    "scale": None,
    "admission": "/dev/shm",
    "look_ups": "/dev/shm",
    "md5": "/dev/shm",
    "quota": "/dev/shm",
    "sick": "/dev/shm",
    "shared": None,
}
"""The programs, with the directory of their caches; None means a disk."""


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    parser.add_argument("--policies", default="", help="hit_ratio: only these (lru,none)")
    parser.add_argument("--workloads", default="", help="hit_ratio: only these (zipf,switch)")
    arguments = parser.parse_args()
    base = PROGRAMS[arguments.program]
    if base is not None:
        os.environ["TMPDIR"] = base
    sandbox.run(f"engine-{arguments.program}", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import machine
    from bench.engine.rig import Options

    began = time.monotonic()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    description = machine.describe(directory)
    program = importlib.import_module(f"bench.engine.{arguments.program}")
    policies, workloads = (
        [name for name in text.split(",") if name]
        for text in (arguments.policies, arguments.workloads)
    )

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {text}", soft_wrap=True)

    gc.freeze()  # this and the thresholds are as in the daemon
    gc.set_threshold(50_000, 50, 100)
    findings = program.run(directory, Options(arguments.quick, policies, workloads, say))
    console.print(
        "[dim]{cpu}, {cores} cores; {cache_file_system}; load before: {load_before}; "
        "commit {commit}[/]".format(**description),
        soft_wrap=True,
    )
    findings.print(console)
    settings = {
        "program": arguments.program,
        "quick": arguments.quick,
        "policies": policies,
        "workloads": workloads,
        "seconds": round(time.monotonic() - began, 1),
    }
    console.print(f"[dim]{settings['seconds']} s[/]")
    if arguments.json:
        findings.write(arguments.json, description, settings)
        console.print(f"wrote {arguments.json}", soft_wrap=True)
    return int(arguments.strict and any(not bar.passed for bar in findings.bars))


if __name__ == "__main__":
    main()
