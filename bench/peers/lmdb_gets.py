"""Measure random gets from an LMDB file through the mount, over mmap."""

from bench import rig
from bench.peers import data
from bench.peers.lab import Lab, run_script
from bench.peers.peer import Peer

_MOST_GETS = 200_000
_COLD_GETS, _COLD_S = 50, 10.0
"""The number is small, so that most gets still find their part of the file uncached."""


def lmdb_gets(lab: Lab) -> None:
    """Measure. Each round begins with all cold gets, because dropping the page cache also affects
    the server."""
    lab.data("lmdb")
    for turn in lab.rounds("lmdb"):
        with lab.all_mounted("lmdb"):
            for peer in lab.able("lmdb", turn):
                if peer.bucket:
                    with lab.attempt(peer, "lmdb", 90):
                        _gets(lab, peer, "cold", turn)
                        lab.read(peer, "lmdb", [data.LMDB_NAME], chunks=True)
            for peer in lab.able("lmdb", turn):
                with lab.attempt(peer, "lmdb", 90):
                    if rig.can_drop_caches():
                        rig.drop_page_cache()
                        _gets(lab, peer, "dropped", turn)
                    lab.read(peer, "lmdb", [data.LMDB_NAME], chunks=True)
                    _gets(lab, peer, "warm", turn)


def _gets(lab: Lab, peer: Peer, state: str, turn: int) -> None:
    most, most_s = (_COLD_GETS, _COLD_S) if state == "cold" else (_MOST_GETS, lab.scale.random_s)
    gets, _, seconds = run_script(
        "lmdb_reader.py", peer.path / "lmdb" / data.LMDB_NAME, data.lmdb_records(lab.bench),
        most, most_s, turn, site=True,
    )  # fmt: skip
    lab.measures.add(f"lmdb.{state}", peer.name, gets / seconds)
