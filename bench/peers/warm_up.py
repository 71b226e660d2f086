"""Measure the peers' commands that load everything ahead."""

import time

from bench.peers.lab import Lab


def warm_up(lab: Lab) -> None:
    """Measure the whole command, each time with an empty cache."""
    lab.data("small")
    lab.data("large")
    for turn in lab.rounds("warmup"):
        for prefix in ("small", "large"):
            for peer in lab.able("warmup", turn):
                with lab.attempt(peer, "warmup", 120), peer.fresh():
                    before = lab.gets(peer)
                    began = time.monotonic()
                    peer.warm_up(prefix)
                    seconds = time.monotonic() - began
                    if lab.gets(peer) == before:
                        raise RuntimeError("it fetched nothing")
                    done = (
                        lab.scale.small_files if prefix == "small" else lab.scale.large_bytes / 1e6
                    )
                    lab.measures.add(f"warmup.{prefix}", peer.name, done / seconds)
