"""docs/GLOSSARY.md: it explains each word once, and the modules that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/GLOSSARY.md").read_text()
MODULE = re.compile(r"`([a-z_0-9/]+\.(?:py|c|h))`")
HEADS = ("word", "in the code", "---")


def rows() -> list[list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in HEADS]


def test_modules_exist() -> None:
    named = {name for row in rows() for cell in row[1:3] for name in MODULE.findall(cell)}
    assert len(named) > 50
    assert {name for name in named if not (ROOT / "src/cachefs" / name).exists()} == set()


def test_words_are_explained_once() -> None:
    words = [row[0] for row in rows() if len(row) == 4]
    assert len(words) > 100
    assert len(words) == len(set(words))


def test_each_word_has_a_meaning_and_a_module() -> None:
    assert [row[0] for row in rows() if len(row) == 4 and not (row[1] and row[2])] == []
