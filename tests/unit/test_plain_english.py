"""The text of the project is plain English: CONTRIBUTING names the rules, this test the words."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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

LOG_METHODS = {"debug", "info", "warning", "error", "critical", "exception"}
MOST_WORDS = 30
"""Of a sentence in a help text."""


class Text(NamedTuple):
    """A text for users. `kind` is "help", "metric", "log", "error" or "print"."""

    line: int
    kind: str
    text: str


def texts_for_users(tree: ast.AST) -> Iterator[Text]:
    """The texts that users see: of options, commands, metrics, log messages, errors and output."""
    for node in ast.walk(tree):
        match node:
            case ast.Call():
                yield from _texts_of_call(node)
            case ast.AnnAssign(target=ast.Name(id="_VERBS"), value=ast.Dict(values=values)):
                for value in values:
                    yield from _texts("help", value)


def _texts_of_call(call: ast.Call) -> Iterator[Text]:
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    for keyword in call.keywords:
        if keyword.arg in ("help", "short_help", "description"):
            yield from _texts("help", keyword.value)
    kind = ""
    if method in LOG_METHODS and owner.endswith(("log", "logger")):
        kind = "log"
    elif method.endswith(("Error", "Refusal")):
        kind = "error"
    elif method == "echo":
        kind = "print"
    elif name in ("Metric", "_counter", "_gauge"):
        yield from _texts("metric", call.args[3 if name == "Metric" else 1])
    if kind:
        for argument in call.args:
            yield from _texts(kind, argument)


def _texts(kind: str, node: ast.expr) -> Iterator[Text]:
    """The text of a string or of an f-string, else the strings in an expression."""
    match node:
        case ast.Constant(value=str(text)):
            yield Text(node.lineno, kind, text)
        case ast.JoinedStr(values=values):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in values)
            yield Text(node.lineno, kind, "".join(map(str, parts)))
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            yield from _texts(kind, one)
            yield from _texts(kind, other)


def faults(text: Text) -> Iterator[str]:
    """What is wrong with a text for users."""
    for pattern in (TELLTALE, PRIVATE):
        if found := pattern.search(text.text):
            yield f'"{found[0]}"'
    whole = re.sub(r" \[[^]]*\]$", "", text.text)  # without the default
    if text.kind in ("help", "metric") and whole != "X" and "\n" not in whole:
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


def test_texts_for_users_are_plain() -> None:
    found = []
    kinds = Counter[str]()
    for path in SOURCES:
        if path.suffix == ".py":
            for text in texts_for_users(ast.parse(path.read_text())):
                kinds[text.kind] += 1
                where = f"{path.relative_to(ROOT)}:{text.line}"
                found += [f"{where}: {text.text} ({fault})" for fault in faults(text)]
    assert min(kinds[kind] for kind in ("help", "metric", "log", "error", "print")) > 50, kinds
    assert found == []
