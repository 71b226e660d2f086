"""Read files of 20 to 180 KB: cold, warm, without page cache, and with blocks in memory."""

import subprocess
import time

from bench import rig
from bench.case import shuffled
from bench.peers.lab import Lab
from bench.peers.peer import Cache, Peer

_WARM_S = 2.0
"""The approximate seconds of one measurement of warm reads, which makes at least one pass."""
_SETTLE_S = 2.0
"""The pause after reads, because the peers still write the data to their caches."""


def cold(lab: Lab) -> None:
    """Measure cold reads, with a fresh mount for each measurement."""
    lab.data("small")
    names = lab.bench.small_files()
    for turn in lab.rounds("cold"):
        order = shuffled(names, turn)[: lab.scale.cold_files]
        for readers in (1, 16):
            for peer in lab.able("cold", turn):
                with lab.attempt(peer, "cold", 120), peer.fresh():
                    if readers == 1:
                        reading = lab.read(peer, "small", order, 1)
                    else:
                        with lab.cost("cold", peer) as readings:
                            reading = lab.read(peer, "small", order, readers)
                            readings.append(reading)
                    lab.measures.add(f"cold.{readers}", peer.name, reading.files_s)


def cached(lab: Lab) -> None:
    """Measure cached reads. All peers are mounted together and read everything before the first
    round."""
    _cached(lab, "cached", Cache())


def memory(lab: Lab) -> None:
    """Measure the same with caches on tmpfs."""
    if not rig.can_drop_caches():
        return
    place = lab.bench.directory / "memory"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], timeout=20, check=True)
    try:
        _cached(lab, "memory", Cache(in_memory=True))
    finally:
        subprocess.run(["umount", "-l", str(place)], timeout=20, check=False)
        place.rmdir()


def _cached(lab: Lab, workload: str, cache: Cache) -> None:
    lab.data("small")
    names = lab.bench.small_files()
    with lab.all_mounted(workload, cache):
        for peer in lab.able(workload):
            lab.bench.say(f"{workload}: filling the cache of {peer.name}")
            with lab.attempt(peer, workload, 120):
                lab.read(peer, "small", names, 8)
        time.sleep(_SETTLE_S)
        for turn in lab.rounds(workload):
            order = shuffled(names, turn)
            for peer in lab.able(workload, turn):
                with lab.attempt(peer, workload, 180):
                    if workload == "cached":
                        _warm(lab, peer, order)
                    if rig.can_drop_caches():
                        _dropped(lab, workload, peer, order)


def _warm(lab: Lab, peer: Peer, order: list[str]) -> None:
    rate = lab.read(peer, "small", order, 4).files_s
    passes = max(1, min(lab.scale.warm_passes, int(_WARM_S * rate / len(order))))
    for readers in (1, 4):
        reading = lab.read(peer, "small", order, readers, passes=passes)
        lab.measures.add(f"cached.warm.{readers}", peer.name, reading.files_s)
    reading = lab.read(peer, "small", order, 1, passes=passes, by_python=True)
    lab.measures.add("cached.warm.python", peer.name, reading.files_s)
    if peer.bucket:
        lab.measures.add("rss.cached", peer.name, peer.usage().rss_bytes / 1e6)


def _dropped(lab: Lab, workload: str, peer: Peer, order: list[str]) -> None:
    before = lab.gets(peer)
    for readers in (1, 4):
        rig.drop_page_cache()
        if workload == "cached" and readers == 4:
            with lab.cost("cached", peer) as readings:
                reading = lab.read(peer, "small", order, readers)
                readings.append(reading)
        else:
            reading = lab.read(peer, "small", order, readers)
        lab.measures.add(f"{workload}.dropped.{readers}", peer.name, reading.files_s)
    if gets := lab.gets(peer) - before:
        lab.measures.notes[f"{workload}.dropped.1", peer.name] = (
            f"with {gets} GETs in {2 * len(order)} reads, although everything had been read before"
        )
