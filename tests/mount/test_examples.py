"""README and docs: every example of a command is run, in its order, on a mount of a directory."""

import shlex

import pytest
from click.testing import CliRunner

from cachefs.cli import main
from tests.mount.harness import Site
from tests.servers.examples import command_lines, documents

_SHORTER = {
    "stats": ("-n", "1", "-i", "0.2"),
    "profile": ("-w", "0.2"),
    "install-systemd": ("--dry-run",),
}
"""What would never end, or change this machine."""
_SERVERS = {"csi", "fluid", "keeper"}
"""Verbs that serve until they are ended. Only their options are checked here."""


@pytest.fixture
def data(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("train/0001.jpg", "valid/0002.jpg", "old/0003.jpg"):
        (site.files / name).parent.mkdir()
        (site.files / name).write_bytes(b"x" * 1000)
    root = site.mountpoint.parent
    (root / "today.txt").write_text("train/0001.jpg\n")
    monkeypatch.chdir(root)
    return site


def test_every_command_line_works(data: Site) -> None:
    done = []
    for file in documents():
        for line in command_lines(file):
            if "metadata export" in line.text:
                data.umount()  # before it, a manifest was mounted
            done.append(_run(data, line.text))
    assert len(done) >= 15
    assert {"mount", "umount", "load", "du", "pin", "evict", "refresh", "set"} <= set(done)


def _run(site: Site, line: str) -> str:
    places = {
        "s3://bucket/prefix": site.source,
        "s3://bucket/data": site.source,
        "/mnt/data": str(site.mountpoint),
        "/ssd/cachefs": str(site.cache),
        "/var/log/cachefs": str(site.mountpoint.parent),
        "cache1:11211,cache2:11211,cache3:11211": "127.0.0.1:1",
        "cache1:11211,cache2:11211": "127.0.0.1:1",
    }
    for theirs, ours in places.items():
        line = line.replace(theirs, ours)
    _, verb, *words = shlex.split(line)
    if verb in _SERVERS:
        command = main.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        command.make_context(verb, words)
        return verb
    if verb == "mount":
        if site.is_mounted():
            site.umount()
        if "--cache-size" in words:
            words[words.index("--cache-size") + 1] = "256MiB"  # not what this disk has
        if "--cache-dir" not in words:
            words += ["--cache-dir", str(site.cache)]
        site.cli(verb, *words, "--log-file", site.log)
        return verb
    if not site.is_mounted():
        site.mount()
    answer = CliRunner().invoke(main, [verb, *words, *_SHORTER.get(verb, ())])
    if verb == "top":
        assert "top needs a terminal" in answer.output
    else:
        assert answer.exit_code == 0, (line, answer.output)
    return verb
