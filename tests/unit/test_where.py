"""docs/WHERE.md: every file, function, constant and test that it names exists."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/WHERE.md").read_text()
FILE = re.compile(r"`([a-z_0-9/]+\.(?:py|c))`")
NAME = re.compile(r"`((?:[A-Z]\w*\.)?[A-Za-z_]\w*)`")


class Row(NamedTuple):
    files: list[str]
    names: list[str]


def rows() -> list[Row]:
    found = [re.findall(r"`[^`]+`", line) for line in TEXT.splitlines() if line.startswith("|")]
    return [
        Row(
            [match[1] for text in row if (match := FILE.fullmatch(text))],
            [match[1] for text in row if (match := NAME.fullmatch(text))],
        )
        for row in found
    ]


def path_of(file: str) -> Path:
    return ROOT / ("" if file.startswith("tests/") else "src/cachefs") / file


def functions_of(path: Path) -> set[str]:
    if path.suffix == ".c":
        return set(re.findall(r"^[\w \*]*?\b(\w+)\([^;]*\{$", path.read_text(), re.MULTILINE))
    found = set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, functions):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, functions):
                    found.add(f"{node.name}.{each.name}")
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    found.add(f"{node.name}.{each.target.id}")
    return found


@pytest.mark.parametrize("row", [row for row in rows() if row.files], ids=str)
def test_what_a_row_names_exists(row: Row) -> None:
    """Each function and constant is in one of the files of its row."""
    there = set().union(*(functions_of(path_of(file)) for file in row.files))
    assert set(row.names) - there == set()


def test_enough_is_named() -> None:
    assert sum(len(row.names) for row in rows()) > 100
