"""Fuzz one target: `.venv/bin/python -m tests.fuzz TARGET --seconds 600`.

The Python targets need atheris (`.venv/bin/pip install atheris`), `relay` and `http_engine` need
clang (Debian: `apt-get install clang`). Neither is needed for `make test`, which replays the
corpora. Inputs that are new are kept in .build/fuzz/TARGET; one that fails is written beside it,
and belongs into tests/fuzz/corpus/TARGET with the change that mends the cause.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.fuzz.engine import COMPILED, HERE, TARGETS, load

BUILD = HERE.parents[1] / ".build" / "fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, *COMPILED])
    parser.add_argument("--seconds", type=int, default=600)
    wanted = parser.parse_args()
    found = BUILD / wanted.target
    found.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-max_total_time={wanted.seconds}",
        "-timeout=20",
        "-rss_limit_mb=1024",
        "-max_len=65536",
        f"-artifact_prefix={BUILD}/{wanted.target}-",
        str(found),
        str(HERE / "corpus" / wanted.target),
    ]
    is_compiled = wanted.target in COMPILED
    return (_compiled if is_compiled else _python)(wanted.target, arguments)


def _compiled(target: str, arguments: list[str]) -> int:
    program = BUILD / f"{target}_fuzz"
    sources, libraries = COMPILED[target]
    options = ["-std=gnu11", "-g", "-O1", "-fno-sanitize-recover=all"]
    options.append("-fsanitize=fuzzer,address,undefined")
    command = ["clang", *options, *sources(), *libraries, "-lpthread", "-o", program]
    subprocess.run(command, check=True)
    return subprocess.run([program, *arguments], check=False).returncode


def _python(target: str, arguments: list[str]) -> int:
    try:
        import atheris
    except ImportError:
        print("this needs atheris: .venv/bin/pip install atheris", file=sys.stderr)
        return 2
    import logging

    logging.getLogger("cachefs").setLevel(logging.CRITICAL + 1)
    with atheris.instrument_imports(include=["cachefs"]):
        fuzz = load(target)
    atheris.Setup([sys.argv[0], *arguments], fuzz)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(main())
