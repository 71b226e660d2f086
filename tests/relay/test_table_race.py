"""The shared table's protocol, and the table of open files, in C, with as many threads as are there
(table_race.c, opens_race.c)."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RELAY = HERE.parents[1] / "src/cachefs/fuse/relay"
SECONDS = "3"

with_and_without_sanitizer = pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O2"], id="optimised"),
        # Fences are beyond the sanitizer; every access that they order is an atomic one.
        pytest.param(["-O1", "-g", "-fsanitize=thread", "-Wno-tsan"], id="thread-sanitizer"),
    ],
)


def run(program: Path, sources: list[Path], flags: list[str]) -> None:
    """Build the program and run it. It ends with 0 if nothing was wrong."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{RELAY}", *flags]
    subprocess.run([compiler, *options, *sources, "-lpthread", "-o", program], check=True)
    done = subprocess.run([program, SECONDS], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


@with_and_without_sanitizer
@pytest.mark.long
def test_nobody_is_given_bytes_of_another_block(flags: list[str], tmp_path: Path) -> None:
    run(tmp_path / "table_race", [HERE / "table_race.c", RELAY / "table.c"], flags)


@with_and_without_sanitizer
@pytest.mark.long
def test_opens_that_overlap_are_answered_alike(flags: list[str], tmp_path: Path) -> None:
    sources = [HERE / "opens_race.c", RELAY / "opens.c", RELAY / "table.c"]
    model = ["-Dioctl=model_ioctl", "-Dwritev=model_writev"]
    run(tmp_path / "opens_race", sources, [*flags, *model])
