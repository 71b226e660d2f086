"""Files are opened by `trusted_path.py`, except where the list here says why not."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import cachefs

SOURCES = Path(cachefs.__file__).parent

_OPENS = {"open", "io.open", "os.open", "os.mkdir", "os.makedirs"}
_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "mkdir"}

_NO_PATHS = re.compile(
    r"os\.devnull|dir_fd=|opener=open_file|opener=self\._create|\(f?'/(proc|sys|dev)/|^open\(fd,"
)
"""Calls below a descriptor, with a checked opener, or on files of the kernel."""

_CHECKED = "in a cache directory or spool: its way and its content were checked when it was opened"
_KERNEL = "a file of the kernel"

ALLOWED = {
    "cache/tier/index.py boot_id": _KERNEL,
    "cache_dir": _CHECKED,
    "cli/console.py _redirection": "in the runtime directory",
    "cli/install_systemd.py": "the units of this program, for the system's or the user's systemd",
    "cli/nodes/api_server.py": "the service account of a pod, which Kubernetes has put there",
    "cli/thin_runtime": "the directories that Fluid has made for this container",
    "control/serving.py _listen_for_commands": "in the runtime directory",
    "control/serving.py listener_uid": _KERNEL,
    "control/console/assets.py": "files of this program",
    "csi": "the kubelet's directories, which csi/targets.py checks in its own way",
    "daemon/memory_limit.py": _KERNEL,
    "daemon/tiers.py home_of": "in the runtime directory",
    "db": _CHECKED,
    "fuse/kernel_mount.py": "/dev/fuse and /etc/fuse.conf",
    "fuse/session.py _write_setting": _KERNEL,
    "halt_polling.py": _KERNEL,
    "load/job_files.py": _CHECKED,
    "manifest/table.py": _CHECKED,
    "mounts/runtime.py": "in the runtime directory, which `runtime_dir` checks",
    "mounts/unmount.py _process_name": _KERNEL,
    "origin/fsspec": "the source: its paths are followed from a descriptor of its own",
    "staging": _CHECKED,
    "supervisor/hang_detection.py": _KERNEL,
    "trusted_path.py": "opens for all others",
}
"""The reasons, by the beginning of `FILE FUNCTION`."""


def calls_in(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield each call that opens or makes a file: its function, its text, its line."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}" if function else child.name
            elif isinstance(child, ast.Call) and opens(child):
                yield function, ast.unparse(child), child.lineno
            yield from visit(child, inner)

    yield from visit(ast.parse(text), "")


def opens(call: ast.Call) -> bool:
    """Return whether a call opens or makes a file by a path."""
    name, text = ast.unparse(call.func), ast.unparse(call)
    if _NO_PATHS.search(text):
        return False
    if name in _OPENS:
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    method = call.func.attr
    if method == "open":  # of `Path`, which has the mode first, or no argument at all
        if call.args:
            mode = call.args[0]
            return isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwxabt+")
        return not call.keywords or any(word.arg == "encoding" for word in call.keywords)
    return method in _METHODS or (method == "touch" and not call.args)


def test_calls_are_found() -> None:
    text = """
class A:
    def b(self):
        open("x"); open("/proc/self/maps"); os.open(os.devnull, 0); os.open(x, 0)
        path.open("rb"); path.open(encoding="utf-8"); path.open()
        (path / "x").read_text(); Path(y).write_bytes(b""); p.mkdir()
        Database.open(path, tables); stream.read(); json.loads(text); webbrowser.open(url)
"""
    assert len(list(calls_in(text))) == 8


def test_no_file_is_opened_past_the_checks() -> None:
    used, found = set(), []
    for file in sorted(SOURCES.rglob("*.py")):
        name = str(file.relative_to(SOURCES))
        for function, text, line in calls_in(file.read_text(encoding="utf-8")):
            keys = {key for key in ALLOWED if f"{name} {function}".startswith(key)}
            used |= keys
            if not keys:
                found.append(f"{name}:{line} {function}: {text}")
    assert found == [], "use cachefs.trusted_path, or say here why not"
    assert used == set(ALLOWED), "these are not needed any more"
