"""`cachefs completion`: the scripts, and what they ask cachefs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs.cli import main

BIN = Path(sys.executable).parent
SHELLS = ("bash", "zsh", "fish")


def script_of(shell: str) -> str:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0, done.output
    return done.output


def completions(*words: str, program: str = "cachefs") -> list[str]:
    """What bash would offer for the last of `words`."""
    done = subprocess.run(
        [BIN / program],
        env=os.environ
        | {
            "_CACHEFS_COMPLETE": "bash_complete",
            "COMP_WORDS": "\n".join([program, *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_asks_for_completions(shell: str) -> None:
    text = script_of(shell)
    assert f"_CACHEFS_COMPLETE={shell}_complete" in text
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_other_shells_are_refused() -> None:
    done = CliRunner().invoke(main, ["completion", "tcsh"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1


def test_verbs() -> None:
    assert completions("um") == ["plain,umount"]
    assert "plain,mount" in completions("")


def test_verbs_of_verbs_and_options() -> None:
    assert completions("cache", "") == ["plain,ls", "plain,rm"]
    assert completions("upgrade", "--al") == ["plain,--all"]
    assert completions("completion", "z") == ["plain,zsh"]


def test_files_where_nothing_else_fits() -> None:
    assert completions("load", "/mn") == ["file,/mn"]
    assert completions("load", "--nothing") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_with_the_script() -> None:
    program = script_of("bash") + (
        "\nCOMP_WORDS=(cachefs up); COMP_CWORD=1; _cachefs_completion cachefs"
        '\necho "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", program],
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("upgrade\n", "")
