"""Read one large file, in order and at random: cold, cached, page-cached."""

from bench import rig
from bench.peers.lab import Lab, run_script
from bench.peers.peer import Peer

_PIECES = {"4k": 4 << 10, "128k": 128 << 10}
_MOST_READS = 50_000
_COLD_S = 10.0
_COLD_READS = 50
"""The number is small, so that most reads still find their part of the file uncached."""


def large_file(lab: Lab) -> None:
    """Measure. Each round begins with all cold reads, because dropping the page cache also affects
    the server."""
    lab.data("large")
    for turn in lab.rounds("large"):
        for peer in lab.able("large", turn):
            if peer.bucket:
                with lab.attempt(peer, "large", 90), peer.fresh():
                    _random(lab, peer, "cold", turn)
        with lab.all_mounted("large"):
            for peer in lab.able("large", turn):
                if peer.bucket:
                    with lab.attempt(peer, "large", 90), lab.cost("large.cold", peer) as read:
                        read.append(_in_order(lab, peer, "large.cold"))
            for peer in lab.able("large", turn):
                with lab.attempt(peer, "large", 90):
                    _cached(lab, peer, turn)


def _cached(lab: Lab, peer: Peer, turn: int) -> None:
    _in_order(lab, peer)
    _in_order(lab, peer, "large.warm")
    if rig.can_drop_caches():
        rig.drop_page_cache()
        with lab.cost("large.dropped", peer) as read:
            read.append(_in_order(lab, peer, "large.dropped"))
        rig.drop_page_cache()
        _random(lab, peer, "dropped", turn)


def _in_order(lab: Lab, peer: Peer, key: str | None = None) -> rig.Reading:
    reading = lab.read(peer, "large", [lab.bench.large_file()], chunks=True)
    if key is not None:
        lab.measures.add(key, peer.name, reading.mb_s)
    return reading


def _random(lab: Lab, peer: Peer, state: str, turn: int) -> None:
    """Read small pieces in the first half of the file, larger ones in the second."""
    half = lab.scale.large_bytes // 2
    path = peer.path / "large" / lab.bench.large_file()
    most, most_s = (_COLD_READS, _COLD_S) if state == "cold" else (_MOST_READS, lab.scale.random_s)
    for number, (name, piece) in enumerate(_PIECES.items()):
        reads, _, seconds = run_script(
            "random_reader.py", path, piece, number * half, (number + 1) * half,
            most, most_s, turn,
        )  # fmt: skip
        lab.measures.add(f"large.{state}.{name}", peer.name, reads / seconds)
