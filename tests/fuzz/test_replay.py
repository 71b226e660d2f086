"""Every corpus, and some mutations of it: nothing from outside crashes or hangs anything.

`python -m tests.fuzz TARGET` looks for more.
"""

import logging
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.fuzz.engine import COMPILED, HERE, TARGETS, corpus, load, mutations

MUTATIONS = 300
MOST_S = 1.0
"""Of one target's mutations; a slow machine tries fewer of them."""


@pytest.fixture
def _unheard() -> None:
    """What is logged of nonsense is nobody's concern here."""
    logging.getLogger("cachefs").setLevel(logging.CRITICAL + 1)


@pytest.mark.long
@pytest.mark.usefixtures("_unheard")
@pytest.mark.parametrize("name", TARGETS)
def test_python(name: str) -> None:
    fuzz = load(name)
    seeds = corpus(name)
    for data in seeds:
        _try(fuzz, data)
    until = time.monotonic() + MOST_S
    for data in mutations(seeds, MUTATIONS, name):
        _try(fuzz, data)
        if time.monotonic() > until:
            break


def _try(fuzz, data: bytes) -> None:
    try:
        fuzz(data)
    except BaseException as error:
        error.add_note(f"the input was {data!r}")
        raise


@pytest.mark.timeout(600)  # most of it is the compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "sanitizers"),
    [
        ("relay", "address,undefined"),
        ("http_engine", "address,undefined"),
        ("http_engine", "thread"),
    ],
)
def test_compiled(target: str, sanitizers: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    program = tmp_path / target
    options = ["-std=gnu11", "-g", "-O1", "-DREPLAY", "-Wall", "-Wextra", "-Werror"]
    options += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    sources, libraries = COMPILED[target]
    command = [compiler, *options, *sources(), *libraries, "-lpthread", "-o", program]
    subprocess.run(command, check=True)
    seeds = sorted((HERE / "corpus" / target).iterdir())
    done = subprocess.run([program, *seeds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
