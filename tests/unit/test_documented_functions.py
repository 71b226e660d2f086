"""What a document names has a caller: a function that only tests call keeps no promise.

A method counts as called if any attribute of its name is used in src. So the check finds nothing
about methods whose names are common.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from tests.unit.texts import ROOT, SOURCES

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMED = re.compile(r"`(?:[\w/]+\.py )?(?:\w+\.)?(\w+)(?:\(\))?`")
CALLED_FROM_OUTSIDE = ("cachefs_hints.py", "fuse/operations.py", "fuse/writing.py", "csi/")
"""By training jobs, by the kernel, and by Kubernetes."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def uses_in(node: ast.AST) -> Counter[str]:
    """How often each name is used in this part of a module."""
    uses: Counter[str] = Counter()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                uses[name] += 1
    return uses


def uncalled(modules: dict[str, str]) -> set[str]:
    """Names of functions in these sources, by path, that nothing outside themselves uses."""
    uses: Counter[str] = Counter()
    own: defaultdict[str, int] = defaultdict(int)
    for source in modules.values():
        tree = ast.parse(source)
        uses += uses_in(tree)
        for function in (part for part in ast.walk(tree) if isinstance(part, Function)):
            own[function.name] += uses_in(function)[function.name]
    entries = {
        function.name
        for path, source in modules.items()
        for function in ast.walk(ast.parse(source))
        if isinstance(function, Function)
        and (function.decorator_list or any(part in path for part in CALLED_FROM_OUTSIDE))
    }
    unused = {name for name in own if uses[name] <= own[name] and not name.startswith("__")}
    return unused - entries


def test_documented_functions_have_callers() -> None:
    modules = {str(path): path.read_text() for path in SOURCES if path.suffix == ".py"}
    nobody_calls = uncalled(modules)
    found = {
        f"{document.relative_to(ROOT)}: {name}"
        for document in DOCUMENTS
        for name in NAMED.findall(document.read_text())
        if name in nobody_calls
    }
    assert found == set()


def test_a_function_without_a_caller_is_found() -> None:
    source = "class A:\n def kept(self): self.kept()\n def called(self): pass\nA().called()"
    assert uncalled({"a.py": source}) == {"kept"}
    assert uncalled({str(Path("fuse/operations.py")): source}) == set()
