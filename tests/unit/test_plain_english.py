"""The text of the project is plain English: CONTRIBUTING names the rules, this test the words."""

import ast
import functools
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
PRIVATE = re.compile(
    r"\b(outranks?|doubts?|untold|quiet|bury|buried|brings?|brought|debts?|donors?|spares?"
    r"|anew|please|makes? no sense|half a character|sign of life)\b",
    re.IGNORECASE,
)
"""Words for which a reader of messages knows a more common one."""

MOST_WORDS = 30
"""Of a sentence in a help text."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The Python sources, parsed."""
    return {path: ast.parse(path.read_text()) for path in SOURCES if path.suffix == ".py"}


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All strings of several words that are no docstrings: what is logged, raised and printed."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                if " " in text and "<" not in text:  # and no XML
                    yield node.lineno, text


def help_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The help texts of options and commands, and the texts of metrics."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        match node:
            case ast.Call(func=ast.Name(id="_gauge" | "_counter"), args=args):
                found = args[1:2]
            case ast.Call(func=ast.Name(id="Metric"), args=args):
                found = args[3:]
            case ast.Call(keywords=keywords):
                found = [word.value for word in keywords if word.arg in ("help", "description")]
            case ast.AnnAssign(target=ast.Name(id="_VERBS"), value=ast.Dict(values=values)):
                found = values
        for text in found:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value


def faults(text: str) -> Iterator[str]:
    """What is wrong with a help text of one paragraph."""
    whole = re.sub(r" \[[^]]*\]$", "", text)  # without the default
    if not re.match(r"[A-Z0-9]", whole) or not whole.endswith("."):
        yield "no full sentence"
    if ";" in whole:
        yield "several facts in one sentence"
    if any(len(sentence.split()) > MOST_WORDS for sentence in whole.split(". ")):
        yield f"a sentence of more than {MOST_WORDS} words"


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


def test_messages_have_no_private_words() -> None:
    found = []
    for path, tree in trees().items():
        for line, text in messages(tree):
            if word := TELLTALE.search(text) or PRIVATE.search(text):
                found.append(f"{path.relative_to(ROOT)}:{line}: {word[0]}: {text}")
    assert found == []


def test_help_texts_are_full_sentences_with_one_fact_each() -> None:
    found, count = [], 0
    for path, tree in trees().items():
        for line, text in help_texts(tree):
            count += 1
            if "\n" not in text:
                found += [f"{path.relative_to(ROOT)}:{line}: {fault}" for fault in faults(text)]
    assert count > 200
    assert found == []
