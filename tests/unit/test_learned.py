"""What an origin has learned about its store is known to later daemons."""

from pathlib import Path

from cachefs.daemon.learned import keep_learned
from cachefs.daemon.tiers import open_names
from cachefs.origin.base import Learned


def test_words_outlive_a_daemon(tmp_path: Path) -> None:
    path = tmp_path / "names"
    first = Learned()
    db = open_names(path)
    keep_learned(db, first)
    assert not first.words
    first.note("one")
    first.note("two")
    db.close()
    later = Learned()
    db = open_names(path)
    keep_learned(db, later)
    db.close()
    assert later.words == {"one", "two"}


def test_an_odd_row_says_nothing(tmp_path: Path) -> None:
    db = open_names(tmp_path / "names")
    db.put("meta", b"learned", b"x" * 5000)
    learned = Learned()
    keep_learned(db, learned)
    assert not learned.words
    db.put("meta", b"learned", b"\xff\x00 word")
    keep_learned(db, learned)
    assert "word" in learned.words
    db.close()
