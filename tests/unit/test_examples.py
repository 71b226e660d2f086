"""README and docs: each example of a configuration is accepted, each command line understood.

`tests/mount/test_examples.py` runs them."""

import json
import re
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from cachefs.cli import main
from cachefs.cli.mount_helper import command as mount_helper
from cachefs.config import load_mount_config, load_table_in
from tests.servers.examples import TOP, Example, blocks, command_lines, documents

TOML = [example for file in documents() for example in blocks(file) if example.language == "toml"]
LINES = [example for file in documents() for example in command_lines(file)]
INLINE = re.compile(r"`(cachefs [^`]+)`")


def test_there_are_examples() -> None:
    assert len(TOML) >= 2
    assert len(LINES) >= 15


@pytest.mark.parametrize("example", TOML, ids=str)
def test_configurations_are_accepted(example: Example, tmp_path: Path) -> None:
    file = tmp_path / "data.toml"
    file.write_text(example.text)
    own = tomllib.loads(example.text)
    source = None if "source" in own else "s3://bucket/prefix"
    mountpoint = None if "mountpoint" in own else "/mnt/data"
    assert load_mount_config(source, mountpoint, {}, file).tiers
    load_table_in(file)


@pytest.mark.parametrize(
    "example",
    [e for file in documents() for e in blocks(file) if e.language in ("json", "yaml")],
    ids=str,
)
def test_other_languages_are_valid(example: Example) -> None:
    parse = json.loads if example.language == "json" else yaml.safe_load
    assert parse(example.text) is not None


def inline_commands() -> list[tuple[str, str]]:
    found = []
    for file in documents():
        for text in INLINE.findall(file.read_text()):
            found += [(f"{file.relative_to(TOP)}: {text}", part) for part in text.split(" | ")]
    return found


@pytest.mark.parametrize(("where", "line"), inline_commands(), ids=lambda text: text)
def test_commands_in_the_text_exist(where: str, line: str) -> None:
    """Verbs, their subcommands, and every option."""
    raw = line.split()
    words = [word.strip("[].") for word in raw]
    assert words.pop(0) == "cachefs", where
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and words:
        if command is not main and raw[-len(words)][0] in "[-":
            command = next(iter(command.commands.values()))  # the default command of its group
            break
        verb = words.pop(0)
        for name in verb.split("|"):
            found = command.get_command(context, name)
            assert found is not None, where
        assert found is not None
        command = found
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for word in words:
        if word.startswith("-") and word not in ("-", "--help"):
            assert word.partition("=")[0] in known, where


def test_lines_for_mount_8_and_fstab_are_understood(tmp_path: Path) -> None:
    text = (TOP / "docs/SYSTEMD.md").read_text().replace("/etc/cachefs", str(tmp_path))
    (tmp_path / "data.toml").write_text("")
    by_hand = re.findall(r"^    mount -t cachefs (\S+) (\S+) -o (\S+)$", text, re.MULTILINE)
    by_table = re.findall(r"^    (\S+) (\S+) cachefs (\S+) 0 0$", text, re.MULTILINE)
    assert by_hand
    assert by_table
    for source, place, words in by_hand + by_table:
        done = CliRunner().invoke(mount_helper, ["-f", "-v", source, place, "-o", words])
        assert f"{source} would be mounted on {place}" in done.output, done.exception
