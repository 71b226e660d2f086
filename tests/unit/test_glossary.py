"""docs/GLOSSARY.md: it explains each word once, and the modules that it names exist."""

import re
from pathlib import Path

from tests.unit.texts import DOCUMENTS, ROOT, SOURCES

TEXT = (ROOT / "docs/GLOSSARY.md").read_text()
MODULE = re.compile(r"`([a-z_0-9/]+\.(?:py|c|h))`")
HEADS = ("word", "in the code", "retired", "---")

RETIRED = {
    "courtesy",
    "desert",
    "deserted",
    "foreseen",
    "intents",
    "loose",
    "overlay",
    "proven",
    "resting",
    "settle",
    "settled",
    "settles",
    "settling",
    "stamps",
    "stillness",
    "surroundings",
    "whereabouts",
}
"""Words that no name, comment or document uses."""

RETIRED_NAMES = {
    "Arrivals",
    "Budget",
    "Courtesy",
    "Flight",
    "Foreseen",
    "Intents",
    "Journal",
    "Overlay",
    "Place",
    "Resting",
    "SharedBlocks",
    "Stamps",
    "Stillness",
    "Surroundings",
    "TierIo",
}
"""Names of classes; as words of the language they have other uses."""


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


def words_of(text: str) -> set[str]:
    """The words of a text, and the parts of the names in it, such as `in` and `flight`."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return {part.lower() for part in parts}


def retired_words_in(path: Path) -> set[str]:
    text = path.read_text()
    if path.name == "GLOSSARY.md":
        text = text.partition("## Retired words")[0]
    text = text.replace("time stamps", "")
    return words_of(text) & RETIRED | set(re.findall(r"\b[A-Z]\w+", text)) & RETIRED_NAMES


def test_no_retired_words() -> None:
    """The history in CHANGELOG may use them."""
    files = [path for path in [*SOURCES, *DOCUMENTS] if path.name != "CHANGELOG.md"]
    assert len(files) > 200
    found = {str(path.relative_to(ROOT)): retired_words_in(path) for path in files}
    assert {name: words for name, words in found.items() if words} == {}


def test_the_glossary_lists_the_retired_words() -> None:
    listed = words_of(TEXT.partition("## Retired words")[2])
    stems = {word for word in RETIRED if not re.search(r"(ed|es|ing|s)$", word)}
    assert stems <= listed
