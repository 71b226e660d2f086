"""Output that can't be written: one line and an exit code, from every command."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
MANIFEST = ("cachefs", "manifest", "create", f"file://{Path(__file__).parent}", "-o", "-")
COMMANDS = (
    ("cachefs", "--help"),
    ("cachefs", "--version"),
    ("cachefs", "mount", "--help"),
    ("cachefs", "status"),
    ("cachefs", "status", "--json"),
    ("cachefs", "cache", "ls"),
    ("cachefs", "completion", "bash"),
    MANIFEST,
    ("mount.cachefs", "--version"),
)

commands = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


def run(
    command: tuple[str, ...], stdout: int | None, closed: tuple[int, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    def close() -> None:
        for number in closed:
            os.close(number)

    before: Callable[[], None] | None = close if closed else None
    return subprocess.run(
        [BIN / command[0], *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=before,
    )


def said(program: str, why: str) -> str:
    return f"{program}: error: the output can't be written: {why}\n"


@commands
def test_a_full_disk(command: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = run(command, full.fileno())
    code = 32 if command[0] == "mount.cachefs" else 1
    assert (done.returncode, done.stderr) == (code, said(command[0], "No space left on device"))


@commands
def test_a_closed_stdout(command: tuple[str, ...]) -> None:
    done = run(command, subprocess.DEVNULL, closed=(1,))
    code = 32 if command[0] == "mount.cachefs" else 1
    assert (done.returncode, done.stderr) == (code, said(command[0], "Bad file descriptor"))


@commands
def test_a_reader_that_has_seen_enough(command: tuple[str, ...]) -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    done = run(command, sender)
    os.close(sender)
    assert (done.returncode, done.stderr) == (1, "")


def test_all_standard_files_are_closed() -> None:
    assert run(("cachefs", "status"), None, closed=(0, 1, 2)).returncode == 1


def test_a_command_without_output_needs_no_stdout() -> None:
    done = run(("cachefs", "umount", "/proc"), None, closed=(0, 1))
    assert done.returncode == 1
    assert "/proc is a mount of proc" in done.stderr


def test_wrong_usage_keeps_its_exit_code_if_nobody_can_be_told() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([BIN / "cachefs", "mount"], stderr=full, check=False)
    assert done.returncode == 2


def test_what_is_in_the_buffer_at_the_end_is_written_or_reported() -> None:
    program = (
        "import sys; from cachefs import cli\n"
        "from cachefs.cli import status\n"
        "status.collect = lambda: [print('x')] and []\n"
        "cli.main(['status'])"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr.decode()) == (
        1,
        said("cachefs", "No space left on device"),
    )
