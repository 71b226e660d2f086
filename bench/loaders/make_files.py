"""Makes one directory for each file format, in a separate process, with the loaders' own writers.
Run as a script:

    LOADERS_PYTHON make_files.py DIRECTORY SAFETENSORS_FILE FORMAT...

`SAFETENSORS_FILE` is copied, and the others get about as many bytes. A format is left out if the
package that writes it is missing.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

VALUE_BYTES = 100_000
_ROW_BYTES = 20_000
_COLUMNS = 16
_SHARDS = 4
_MATRIX_ROWS = 1024


def main() -> None:
    directory, weights = Path(sys.argv[1]), Path(sys.argv[2])
    for name in sys.argv[3:]:
        below = directory / name
        below.mkdir(parents=True)
        try:
            _MAKERS[name](below, weights)
        except ImportError:
            shutil.rmtree(below)


def _safetensors(directory: Path, weights: Path) -> None:
    shutil.copy(weights, directory / "model.safetensors")


def _torch(directory: Path, weights: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(weights), directory / "model.pt")


def _gguf(directory: Path, weights: Path) -> None:
    from gguf import GGUFWriter
    from safetensors.numpy import load_file

    writer = GGUFWriter(directory / "model.gguf", "llama")
    for name, tensor in load_file(weights).items():
        writer.add_tensor(name, tensor.view("int8"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _numpy(directory: Path, weights: Path) -> None:
    import numpy

    values = numpy.fromfile(weights, "uint8")
    rows = len(values) // _MATRIX_ROWS
    numpy.save(directory / "matrix.npy", values[: rows * _MATRIX_ROWS].reshape(-1, _MATRIX_ROWS))


def _model(directory: Path, weights: Path) -> None:
    """Make a Llama with random weights in several shards, with an index."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    hidden, layers = 512, max(2, int(weights.stat().st_size / 8.4e6))
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=8,
        num_key_value_heads=8, num_hidden_layers=layers, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(1)
    logging.disable_progress_bar()
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=weights.stat().st_size // _SHARDS)


def _parquet(directory: Path, weights: Path) -> None:
    """Make columns of integers, in groups of 256 Ki rows."""
    import pyarrow
    from pyarrow import parquet

    values = pyarrow.py_buffer(weights.read_bytes())
    rows = values.size // 8 // _COLUMNS
    columns = {
        f"c{number}": pyarrow.Array.from_buffers(
            pyarrow.int64(), rows, [None, values.slice(number * rows * 8, rows * 8)]
        )
        for number in range(_COLUMNS)
    }
    parquet.write_table(
        pyarrow.table(columns), directory / "table.parquet", row_group_size=256 << 10,
        use_dictionary=False, compression="none",
    )  # fmt: skip


def _arrow(directory: Path, weights: Path) -> None:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = list(_records(weights, _ROW_BYTES))
    Dataset.from_dict({"image": rows}).save_to_disk(directory / "train", num_shards=_SHARDS)


def _lmdb(directory: Path, weights: Path) -> None:
    import lmdb

    size_bytes = weights.stat().st_size
    with (
        lmdb.open(str(directory / "train"), map_size=2 * size_bytes + (16 << 20)) as database,
        database.begin(write=True) as transaction,
    ):
        for number, value in enumerate(_records(weights, VALUE_BYTES)):
            transaction.put(b"%08d" % number, value, append=True)


def _webdataset(directory: Path, weights: Path) -> None:
    from webdataset import TarWriter

    records = list(_records(weights, VALUE_BYTES))
    for shard in range(_SHARDS):
        with TarWriter(str(directory / f"train-{shard:06}.tar")) as tar:
            for number in range(shard, len(records), _SHARDS):
                tar.write({"__key__": f"{number:08}", "jpg": records[number]})


def _records(weights: Path, size_bytes: int) -> Iterator[bytes]:
    with weights.open("rb") as file:
        while len(record := file.read(size_bytes)) == size_bytes:
            yield record


_MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "gguf": _gguf,
    "numpy": _numpy,
    "model": _model,
    "parquet": _parquet,
    "arrow": _arrow,
    "lmdb": _lmdb,
    "webdataset": _webdataset,
}


if __name__ == "__main__":
    main()
