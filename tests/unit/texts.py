"""The files of the project that people read: its own sources and its documents."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {"csi_pb2.py"}
SOURCES = sorted(
    path
    for suffix in ("py", "c", "h")
    for path in (ROOT / "src").rglob(f"*.{suffix}")
    if path.name not in GENERATED
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
