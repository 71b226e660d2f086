"""Measure `import` of a large tree of Python packages."""

from bench.peers.lab import Lab, run_script


def packages(lab: Lab) -> None:
    """Import twice on a fresh mount in each round: first with nothing cached, then again."""
    lab.data("packages")
    modules = set()
    for turn in lab.rounds("import"):
        for peer in lab.able("import", turn):
            with lab.attempt(peer, "import", 120), peer.fresh():
                for figure in ("first", "second"):
                    count, seconds = run_script("import_reader.py", peer.path / "packages")
                    lab.measures.add(f"import.{figure}", peer.name, seconds)
                    modules.add(count)
    if len(modules) > 1:
        raise RuntimeError(f"not every peer showed the same modules: {sorted(modules)}")
