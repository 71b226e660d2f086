"""Epochs over data for which the cache is too small."""

from bench import rig
from bench.case import shuffled
from bench.peers.lab import Lab
from bench.peers.peer import Cache, Peer

ROOM = 0.385
READERS = 4
_DROP_EVERY = 500


def epochs(lab: Lab) -> None:
    """Each round and peer: all epochs on a fresh mount."""
    lab.data("small")
    names = lab.bench.small_files()
    size_bytes = sum((lab.bench.local / "small" / name).stat().st_size for name in names)
    cache = Cache(size_bytes=int(ROOM * size_bytes) >> 20 << 20)
    for turn in lab.rounds("epochs"):
        for peer in lab.able("epochs", turn):
            with lab.attempt(peer, "epochs", 240), peer.fresh(cache):
                _first, *counted = [
                    _epoch(lab, peer, shuffled(names, 100 * turn + epoch))
                    for epoch in range(lab.scale.epochs)
                ]
                reads = len(names) * len(counted)
                gets, seconds = map(sum, zip(*counted, strict=True))
                lab.measures.add("epochs.hits", peer.name, 1 - gets / reads)
                lab.measures.add("epochs.speed", peer.name, reads / seconds)
        if turn == 1:
            break  # two rounds of several epochs are enough


def _epoch(lab: Lab, peer: Peer, order: list[str]) -> tuple[int, float]:
    """GETs and seconds of reading; the pauses in which the page cache is dropped don't count."""
    before, seconds = lab.gets(peer), 0.0
    for start in range(0, len(order), _DROP_EVERY):
        if rig.can_drop_caches():
            rig.drop_page_cache()
        seconds += lab.read(peer, "small", order[start : start + _DROP_EVERY], READERS).seconds
    return lab.gets(peer) - before, seconds
