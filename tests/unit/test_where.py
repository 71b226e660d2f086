"""docs/WHERE.md: every file and every function that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/WHERE.md").read_text()
FILE = re.compile(r"`([a-z_0-9/]+\.(?:py|c))`")
NAME = re.compile(r"`((?:[A-Z]\w*\.)?[a-z_]\w*)`")


def named() -> list[tuple[str, str]]:
    """Files, each with "" and with the functions that follow it in its row."""
    found: list[tuple[str, str]] = []
    for line in TEXT.splitlines():
        if not line.startswith("|"):
            continue
        file = ""
        for match in re.finditer(r"`[^`]+`", line):
            if is_file := FILE.fullmatch(match[0]):
                file = is_file[1]
                found.append((file, ""))
            elif file and (is_name := NAME.fullmatch(match[0])):
                found.append((file, is_name[1]))
    return found


def functions_of(path: Path) -> set[str]:
    if path.suffix == ".c":
        return set(re.findall(r"^[\w \*]*?\b(\w+)\([^;]*\{$", path.read_text(), re.MULTILINE))
    found = set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, functions):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions)
            }
    return found


@pytest.mark.parametrize("file", sorted({file for file, _ in named()}))
def test_what_is_named_exists(file: str) -> None:
    path = ROOT / "src/cachefs" / file
    assert path.exists()
    wanted = {name for named_file, name in named() if named_file == file and name}
    assert wanted <= functions_of(path)
