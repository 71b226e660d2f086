"""Measure `ls -lR` and `find` of very many files."""

import os
import subprocess
import time

from bench.peers.lab import Lab
from bench.peers.peer import Peer

_COMMANDS = {"find": ["find"], "ls": ["ls", "-lR"]}


def names(lab: Lab) -> None:
    """Measure each cold command on a fresh mount, and then both again on the second mount."""
    lab.data("names")
    for turn in lab.rounds("names"):
        for peer in lab.able("names", turn):
            with lab.attempt(peer, "names", 240):
                with peer.fresh():
                    _walk(lab, peer, "find", "cold")
                with peer.fresh():
                    _walk(lab, peer, "ls", "cold")
                    _walk(lab, peer, "ls", "warm")
                    _walk(lab, peer, "find", "warm")
                    if peer.bucket:
                        lab.measures.add("rss.names", peer.name, peer.usage().rss_bytes / 1e6)


def _walk(lab: Lab, peer: Peer, command: str, state: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [*_COMMANDS[command], str(peer.path / "names")],
        stdin=subprocess.DEVNULL, capture_output=True,
        env={**os.environ, "LC_ALL": "C"}, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    found = done.stdout.count(b".jpg\n")
    if done.returncode or found != lab.scale.names:
        said = done.stderr.decode(errors="replace").strip()[-100:]
        raise RuntimeError(f"{command} found {found:,} of {lab.scale.names:,} files; {said}")
    lab.measures.add(f"names.{command}.{state}", peer.name, seconds)
