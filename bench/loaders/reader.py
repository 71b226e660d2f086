"""Reads with one loader, in a separate process. Run as a script:

    LOADERS_PYTHON reader.py LOADER

It prints `ready` when it has imported the loader. Then it reads the directory of each line `SEED
DIRECTORY` on its standard input, and prints bytes, a checksum of names and contents, and seconds.
The checksum is computed after the time is taken. What lies in mappings is copied out of them, as a
copy to a GPU does.
"""

import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Read = list[tuple[str, Any]]
"""Names, and bytes, tensors or arrays."""
Loader = Callable[[Path, random.Random], Read]


def main() -> None:
    try:
        read = LOADERS[sys.argv[1]]()
    except ImportError as error:
        print(error)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        seed, directory = line.rstrip("\n").split(" ", 1)
        chance = random.Random(int(seed))
        began = time.monotonic()
        found = read(Path(directory), chance)
        seconds = time.monotonic() - began
        print(*_sums(found), seconds, flush=True)
        del found


def _sums(found: Read) -> tuple[int, int]:
    """Return the number of bytes, and a checksum that does not depend on the order."""
    size_bytes = checksum = 0
    for name, data in found:
        view = memoryview(_bytes_of(data))
        size_bytes += view.nbytes
        checksum += zlib.crc32(view, zlib.crc32(name.encode()))
    return size_bytes, checksum


def _bytes_of(data: Any) -> Any:
    if hasattr(data, "untyped_storage"):
        import torch

        return data.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return data.reshape(-1).view("uint8") if hasattr(data, "reshape") else data


# -- weights -----------------------------------------------------------------------------------


def _safe_open(shuffled: bool) -> Callable[[], Loader]:
    def begin() -> Loader:
        import torch  # noqa: F401
        from safetensors import safe_open

        def read(directory: Path, chance: random.Random) -> Read:
            with safe_open(directory / "model.safetensors", "pt", device="cpu") as file:
                names = list(file.keys())
                if shuffled:
                    chance.shuffle(names)
                return [(name, file.get_tensor(name).clone()) for name in names]

        return read

    return begin


def _get_slice() -> Loader:
    """Half of each tensor, as one of two processes that share a model."""
    import torch  # noqa: F401
    from safetensors import safe_open

    def read(directory: Path, chance: random.Random) -> Read:
        found = []
        with safe_open(directory / "model.safetensors", "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found.append((name, part[: part.get_shape()[0] // 2].clone()))
        return found

    return read


def _load_file() -> Loader:
    from safetensors.torch import load_file

    def read(directory: Path, chance: random.Random) -> Read:
        loaded = load_file(directory / "model.safetensors")
        return [(name, tensor.clone()) for name, tensor in loaded.items()]

    return read


def _safetensors_numpy() -> Loader:
    from safetensors.numpy import load_file

    return lambda directory, _: list(load_file(directory / "model.safetensors").items())


def _torch_load(mmap: bool) -> Callable[[], Loader]:
    def begin() -> Loader:
        import torch

        def read(directory: Path, chance: random.Random) -> Read:
            loaded = torch.load(directory / "model.pt", mmap=mmap, weights_only=True)
            return [(name, tensor.clone() if mmap else tensor) for name, tensor in loaded.items()]

        return read

    return begin


def _fastsafetensors() -> Loader:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def read(directory: Path, chance: random.Random) -> Read:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(directory / "model.safetensors")]})
        buffers = loader.copy_files_to_device()
        found = [(name, buffers.get_tensor(name).clone()) for name in loader.get_keys()]
        buffers.close()
        loader.close()
        return found

    return read


def _runai() -> Loader:
    from runai_model_streamer import SafetensorsStreamer

    def read(directory: Path, chance: random.Random) -> Read:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(directory / "model.safetensors"))
            return list(streamer.get_tensors())

    return read


def _transformers() -> Loader:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    def read(directory: Path, chance: random.Random) -> Read:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]

    return read


def _gguf() -> Loader:
    from gguf import GGUFReader

    def read(directory: Path, chance: random.Random) -> Read:
        tensors = GGUFReader(directory / "model.gguf").tensors
        return [(tensor.name, tensor.data.copy()) for tensor in tensors]

    return read


# -- data sets ---------------------------------------------------------------------------------


def _numpy() -> Loader:
    """A batch of rows after the other."""
    import numpy

    def read(directory: Path, chance: random.Random) -> Read:
        rows = numpy.load(directory / "matrix.npy", mmap_mode="r")
        return [(str(at), rows[at : at + 256].copy()) for at in range(0, len(rows), 256)]

    return read


def _parquet() -> Loader:
    """Two of sixteen columns."""
    from pyarrow import parquet

    def read(directory: Path, chance: random.Random) -> Read:
        columns = ["c3", "c11"]
        table = parquet.read_table(directory / "table.parquet", columns=columns, memory_map=True)
        found = []
        for name in columns:
            found.append((name, memoryview(table[name].combine_chunks().buffers()[1])))
        return found

    return read


def _datasets(share: float) -> Callable[[], Loader]:
    """All rows in order, or some at random."""

    def begin() -> Loader:
        from datasets import load_from_disk

        def read(directory: Path, chance: random.Random) -> Read:
            rows = load_from_disk(directory / "train")
            if share == 1:
                return [(str(number), row["image"]) for number, row in enumerate(rows)]
            count = len(rows)
            wanted = [chance.randrange(count) for _ in range(int(count * share))]
            return [(str(number), rows[number]["image"]) for number in wanted]

        return read

    return begin


def _lmdb(share: float) -> Callable[[], Loader]:
    """All records by a cursor, or some at random."""

    def begin() -> Loader:
        import lmdb

        def read(directory: Path, chance: random.Random) -> Read:
            path = str(directory / "train")
            with (
                lmdb.open(path, readonly=True, lock=False, readahead=share == 1) as database,
                database.begin() as transaction,
            ):
                if share == 1:
                    return [(key.decode(), value) for key, value in transaction.cursor()]
                count = database.stat()["entries"]
                wanted = [b"%08d" % chance.randrange(count) for _ in range(int(count * share))]
                return [(key.decode(), transaction.get(key)) for key in wanted]

        return read

    return begin


def _webdataset() -> Loader:
    """All samples of all shards, with four worker processes."""
    import torch  # noqa: F401
    import webdataset

    def read(directory: Path, chance: random.Random) -> Read:
        shards = sorted(map(str, directory.glob("*.tar")))
        samples = webdataset.WebDataset(shards, shardshuffle=False)
        loader = webdataset.WebLoader(samples, num_workers=4, batch_size=None)
        return [(sample["__key__"], sample["jpg"]) for sample in loader]

    return read


LOADERS: dict[str, Callable[[], Loader]] = {
    "safetensors.keys": _safe_open(shuffled=False),
    "safetensors.shuffled": _safe_open(shuffled=True),
    "safetensors.slice": _get_slice,
    "safetensors.load_file": _load_file,
    "safetensors.numpy": _safetensors_numpy,
    "torch.mmap": _torch_load(mmap=True),
    "torch.read": _torch_load(mmap=False),
    "fastsafetensors": _fastsafetensors,
    "runai": _runai,
    "transformers": _transformers,
    "gguf": _gguf,
    "numpy": _numpy,
    "parquet": _parquet,
    "datasets.all": _datasets(1),
    "datasets.random": _datasets(0.1),
    "lmdb.all": _lmdb(1),
    "lmdb.random": _lmdb(0.05),
    "webdataset": _webdataset,
}


if __name__ == "__main__":
    main()
