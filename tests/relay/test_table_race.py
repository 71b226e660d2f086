"""The shared table's protocol, in C, with as many threads as are there (table_race.c)."""

import shutil
import subprocess
from pathlib import Path

import pytest

RELAY = Path(__file__).parents[2] / "src/cachefs/fuse/relay"
PROGRAM = Path(__file__).with_name("table_race.c")
SECONDS = "3"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O2"], id="optimised"),
        # Fences are beyond the sanitizer; every access that they order is an atomic one.
        pytest.param(["-O1", "-g", "-fsanitize=thread", "-Wno-tsan"], id="thread-sanitizer"),
    ],
)
@pytest.mark.long
def test_nobody_is_given_bytes_of_another_block(flags: list[str], tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "table_race"
    sources = [PROGRAM, RELAY / "table.c"]
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{RELAY}", *flags]
    subprocess.run([compiler, *options, *sources, "-lpthread", "-o", program], check=True)
    done = subprocess.run([program, SECONDS], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
