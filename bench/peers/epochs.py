"""Measure epochs over data for which the cache is too small."""

from bench import rig
from bench.case import shuffled
from bench.peers.lab import Lab
from bench.peers.peer import Cache, Peer

ROOM = 0.385
READERS = 4
_DROP_EVERY = 500


def epochs(lab: Lab) -> None:
    """Run all epochs on a fresh mount, for each round and peer."""
    lab.data("small")
    names = lab.bench.small_files()
    size_bytes = sum((lab.bench.local / "small" / name).stat().st_size for name in names)
    cache = Cache(size_bytes=int(ROOM * size_bytes) >> 20 << 20)
    for turn in lab.rounds("epochs"):
        for peer in lab.able("epochs", turn):
            with lab.attempt(peer, "epochs", 240), peer.fresh(cache):
                _epoch(lab, peer, shuffled(names, 1000 * turn))
                before = _counts(lab, peer)
                readings = [
                    reading
                    for epoch in range(1, lab.scale.epochs)
                    for reading in _epoch(lab, peer, shuffled(names, 1000 * turn + epoch))
                ]
                spent = [now - then for now, then in zip(_counts(lab, peer), before, strict=True)]
                _add(lab, peer, readings, *spent)
        if turn == 1:
            break  # two rounds of several epochs are enough


def _epoch(lab: Lab, peer: Peer, order: list[str]) -> list[rig.Reading]:
    """Read one epoch. The pauses that drop the page cache don't count."""
    readings = []
    for start in range(0, len(order), _DROP_EVERY):
        if rig.can_drop_caches():
            rig.drop_page_cache()
        readings.append(lab.read(peer, "small", order[start : start + _DROP_EVERY], READERS))
    return readings


def _counts(lab: Lab, peer: Peer) -> tuple[int, int, int, int]:
    """Return GETs, bytes sent, and the bytes of the peer's own hits and misses, so far."""
    sent_bytes = lab.bench.server.sent_bytes(peer.bucket) if peer.bucket else 0
    return lab.gets(peer), sent_bytes, *(peer.hits() or (0, 0))


def _add(
    lab: Lab,
    peer: Peer,
    readings: list[rig.Reading],
    gets: int,
    sent_bytes: int,
    hit_bytes: int,
    missed_bytes: int,
) -> None:
    files = sum(reading.files for reading in readings)
    own = hit_bytes + missed_bytes
    hits = hit_bytes / own if own else 1 - gets / files
    if "epochs.hits" not in peer.lacks:
        lab.measures.add("epochs.hits", peer.name, hits)
    speed = files / sum(reading.seconds for reading in readings)
    lab.measures.add("epochs.speed", peer.name, speed)
    read_bytes = sum(reading.bytes for reading in readings)
    lab.measures.add("epochs.fetched", peer.name, sent_bytes / read_bytes)
