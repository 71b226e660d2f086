"""The scripts of `python -m bench --only loaders`, with the loaders that the tests have."""

import shutil
import subprocess
import sys
from pathlib import Path

from bench.weights import write_safetensors

SCRIPTS = Path(__file__).parents[2] / "bench/loaders"


def run(script: str, *arguments: object, stdin: str = "") -> list[str]:
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_reader_tells_the_same_of_the_same_bytes_only(tmp_path: Path) -> None:
    weights, made, changed = tmp_path / "weights", tmp_path / "made", tmp_path / "changed"
    write_safetensors(weights, 16 << 20)
    run("make_files.py", made, weights, "safetensors")
    shutil.copytree(made, changed)
    with (changed / "safetensors/model.safetensors").open("r+b") as file:
        file.seek(8 << 20)
        file.write(b"changed")
    lines = "".join(f"7 {root}/safetensors\n" for root in (made, made, changed))
    ready, *read = run("reader.py", "safetensors.numpy", stdin=lines)
    assert ready == "ready"
    first, second, other = (line.split()[:2] for line in read)
    assert first == second != other


def test_a_reader_names_the_package_that_is_missing() -> None:
    assert run("reader.py", "runai") == ["No module named 'runai_model_streamer'"]
