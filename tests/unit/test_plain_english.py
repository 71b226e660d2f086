"""The text of the project is plain English: CONTRIBUTING names the rules, this test the words."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.unit.texts import DOCUMENTS, ROOT, SOURCES

TELLTALE = re.compile(
    r"\b(he|him|his|shall|whoever|whomever|anyhow|in vain|thereof|whereof|hence|lest)\b",
    re.IGNORECASE,
)


def text_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Lines and their numbers: comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from enumerate(text.splitlines(), node.lineno)


def text_of_c(source: str) -> Iterator[tuple[int, str]]:
    """Lines and their numbers: comments."""
    for found in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL):
        first = source.count("\n", 0, found.start()) + 1
        yield from enumerate(found[0].splitlines(), first)


def suspicious_text_of(path: Path) -> Iterable[tuple[int, str]]:
    """The text of a file for its readers, by lines; nothing if no telltale word is in the file."""
    source = path.read_text()
    if not TELLTALE.search(source):
        return ()  # to find the comments takes a hundred times as long
    if path.suffix == ".py":
        return text_of_python(source)
    if path.suffix in (".c", ".h"):
        return text_of_c(source)
    return enumerate(source.splitlines(), 1)


@pytest.mark.parametrize("kind", ["sources", "documents"])
def test_no_telltale_words(kind: str) -> None:
    files = SOURCES if kind == "sources" else DOCUMENTS
    assert len(files) > 10
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in suspicious_text_of(path)
        if TELLTALE.search(line)
    ]
    assert found == [], "say it with a noun: the reader, the daemon, the process"
