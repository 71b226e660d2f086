"""No command prints names and texts of others so that a terminal obeys them."""

import pytest

from cachefs.cli import _VERBS
from cachefs.cli.views.status import print_all
from tests.mount.harness import Site

ODD = ["a\x1b]0;EVIL\x07", "b\nFORGED", "c\x1b[2J\rz", "d\u202efdp", "e\x9b31m"]
DIRECTORY = ODD[0]
FORBIDDEN = ("\x1b", "\x07", "\r", "\x9b", "\u202e", "\nFORGED")

WITHOUT_NAMES = {"completion", "console", "csi", "fluid", "install-systemd", "keeper", "top"}
"""They print nothing of a mount, or are services. `top` draws on a terminal: see its own test."""


def commands(site: Site) -> list[tuple[object, ...]]:
    """A command of each verb, in an order that works; those of a mount before it ends."""
    place, odd = site.mountpoint, site.mountpoint / DIRECTORY
    files = [odd / name for name in ODD]
    return [
        ("status",),
        ("status", place),
        ("load", place),
        ("load", *files, place / "absent\x1b[2J"),
        ("jobs",),
        ("jobs", "failures"),
        ("du", "-d", "3", place),
        ("du", *files),
        ("info", odd, *files),
        ("pin", *files),
        ("unpin", *files),
        ("refresh", *files, odd, place / "absent\x1b[2J"),
        ("evict", "--dry-run", *files),
        ("hint", *files),
        ("profile", place, "--seconds", "0.2"),
        ("stats", "--count", "1", place),
        ("tier", "list", place),
        ("shared", "status", place),
        ("set", place, "max-downloads=9"),
        ("set", place, "access-log=/nonexistent/\x1b[2J"),
        ("reload", place),
        ("node-report", odd, f"x={files[1]}"),
        ("metadata", "export", place, "-o", site.cache / "absent\x1b[2J" / "x"),
        ("manifest", "create", f"file://{site.files}/absent\x1b[2J", "-o", "/dev/null"),
        ("writes", place),
        ("flush", place),
        ("cache", "list", site.cache.parent),
        ("mount", f"file://{site.files}/\x1b[2J", place / "\x1b[2J"),
        ("upgrade", place / "\x1b[2J"),
        ("umount", odd),
        ("umount", place),
        ("check", site.cache),
        ("status", place / "\x1b[2J"),
        ("\x1b[2J",),
    ]


def test_no_command_prints_what_a_terminal_obeys(site: Site) -> None:
    directory = site.files / DIRECTORY
    directory.mkdir()
    for name in ODD:
        (directory / name).write_bytes(b"x")
        (site.files / f"{name}.d").mkdir()
    site.mount("--rw")
    (site.mountpoint / DIRECTORY / "g\x1b[2J").write_bytes(b"x")
    all_commands = commands(site)
    assert {str(command[0]) for command in all_commands} >= _VERBS.keys() - WITHOUT_NAMES
    for command in all_commands:
        done = site._run(*command)
        said = done.stdout + done.stderr
        assert "Traceback" not in said, (command, said)
        for mark in FORBIDDEN:
            assert mark not in said, (command, said)


def test_a_foreign_mount_is_shown_without_its_escape_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its source is the text of whoever mounted it."""
    row = {"state": "foreign", "mountpoint": "/m\n\x1b[2J", "source": "s3://b/\x1b]0;EVIL\x07"}
    print_all([row | {"pid": None, "supervisor_pid": None, "problem": "its\x1b[2J"}])
    said = capsys.readouterr().out
    assert "EVIL" in said
    assert not any(mark in said for mark in FORBIDDEN)
