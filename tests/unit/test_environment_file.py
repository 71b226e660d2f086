"""NAME.env beside NAME.toml, which `mount.cachefs` reads as systemd does."""

import os
from pathlib import Path

import pytest

from cachefs.cli.mounting.environment_file import read_variables
from cachefs.errors import UsageError

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCY="


def written(directory: Path, text: str, mode: int = 0o600) -> Path:
    """The NAME.toml beside a NAME.env with `text`."""
    file = directory / "data.env"
    file.write_text(text)
    file.chmod(mode)
    return directory / "data.toml"


def test_lines_mean_what_they_mean_to_systemd(tmp_path: Path) -> None:
    text = f"""
# a comment
; another
AWS_SECRET_ACCESS_KEY={SECRET}
  SPACES =  two words  \t
EMPTY=
SINGLE='it has \\ and "'
DOUBLE="it has \\" and \\\\ and \\$ and \\n"
HASH=a #b
SINGLE_EMPTY=''
TWICE=1
TWICE=2"""
    assert read_variables(written(tmp_path, text)) == {
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "SPACES": "two words",
        "EMPTY": "",
        "SINGLE": 'it has \\ and "',
        "DOUBLE": 'it has " and \\ and $ and \\n',
        "HASH": "a #b",
        "SINGLE_EMPTY": "",
        "TWICE": "2",
    }


@pytest.mark.parametrize(
    "line",
    [
        f"export KEY={SECRET}",
        SECRET,
        f"1KEY={SECRET}",
        f"KEY='{SECRET}",
        f'KEY="{SECRET}',
        f"KEY='a'{SECRET}",
        f"KEY={SECRET}\\",
    ],
)
def test_other_lines_are_refused_and_not_shown(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"data\.env, line 2: it is not NAME=VALUE") as raised:
        read_variables(written(tmp_path, f"OTHER=1\n{line}\n"))
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def test_bytes_that_are_no_text_are_refused_and_not_shown(tmp_path: Path) -> None:
    config = written(tmp_path, "")
    config.with_suffix(".env").write_bytes(b"KEY=\xff")
    with pytest.raises(UsageError, match=r"data\.env is not UTF-8"):
        read_variables(config)


def test_without_a_file_there_are_no_variables(tmp_path: Path) -> None:
    assert read_variables(tmp_path / "data.toml") == {}
    written(tmp_path, "KEY=1")
    assert read_variables(tmp_path / "data.conf") == {}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=r"others than .* can change it; run: chown"):
        read_variables(written(tmp_path, "KEY=1", mode))


@pytest.mark.root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    config = written(tmp_path, "KEY=1")
    os.chown(config.with_suffix(".env"), 12345, 0)
    with pytest.raises(UsageError, match="others than root can change it"):
        read_variables(config)
