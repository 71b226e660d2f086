"""Loaders of weights and data sets get the right bytes from a mount, used as their manuals say."""

import contextlib
import random
from collections.abc import Iterator

import lmdb
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from webdataset import TarWriter, WebDataset

from tests.mount.harness import Site, eventually

TENSORS = {
    f"layers.{number}.weight": np.frombuffer(
        random.Random(number).randbytes(size_bytes), dtype="float16"
    ).reshape(64, -1)
    for number, size_bytes in enumerate([128, 1 << 20, 3 << 20, 64 << 10, 5 << 20, 256, 2 << 20])
}
RECORDS = {
    b"%08d" % number: random.Random(number).randbytes(1000 + 997 * number) for number in range(120)
}
ROWS = 40_000


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A mount of one file of each kind. Nothing was read of it yet, but by earlier tests."""
    site = Site(tmp_path_factory.mktemp("loaders"))
    files = site.files
    save_file(TENSORS, files / "model.safetensors")
    np.save(files / "matrix.npy", TENSORS["layers.4.weight"])
    with (
        lmdb.open(str(files / "lmdb"), map_size=64 << 20) as database,
        database.begin(write=True) as transaction,
    ):
        for key, value in RECORDS.items():
            transaction.put(key, value)
    (files / "lmdb/lock.mdb").unlink()
    for shard in range(4):
        with TarWriter(str(files / f"train-{shard:06}.tar")) as tar:
            for key in list(RECORDS)[shard::4]:
                tar.write({"__key__": key.decode(), "jpg": RECORDS[key]})
    parquet.write_table(table(), files / "table.parquet", row_group_size=ROWS // 8)
    with (
        pa.OSFile(str(files / "rows.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table().schema) as writer,
    ):
        writer.write_table(table(), max_chunksize=1000)
    site.mount("--workload", "serving")
    yield site
    site.tear_down()


def table() -> pa.Table:
    return pa.table({f"c{number}": np.arange(ROWS) * (number + 1) for number in range(16)})


@pytest.mark.parametrize("order", ["of the keys", "shuffled"])
def test_safetensors_gives_each_tensor_in_any_order(loaded: Site, order: str) -> None:
    with safe_open(loaded.mountpoint / "model.safetensors", "np") as file:
        names = list(file.keys())
        assert set(names) == set(TENSORS)
        if order == "shuffled":
            random.Random(2).shuffle(names)
        for name in names:
            assert np.array_equal(file.get_tensor(name), TENSORS[name], equal_nan=True), name


def test_safetensors_gives_slices_and_all_tensors_at_once(loaded: Site) -> None:
    path = loaded.mountpoint / "model.safetensors"
    with safe_open(path, "np") as file:
        for name, tensor in TENSORS.items():
            assert np.array_equal(file.get_slice(name)[10:20], tensor[10:20], equal_nan=True)
    for name, tensor in load_file(path).items():
        assert np.array_equal(tensor, TENSORS[name], equal_nan=True), name


@pytest.mark.parametrize("lock", [False, True])
def test_lmdb_opens_on_a_read_only_mount_with_and_without_its_lock(
    loaded: Site, lock: bool
) -> None:
    path = loaded.mountpoint / "lmdb"
    keys = list(RECORDS)
    random.Random(3).shuffle(keys)
    with (
        lmdb.open(str(path), readonly=True, lock=lock, readahead=lock) as database,
        database.begin() as transaction,
    ):
        assert [transaction.get(key) for key in keys] == [RECORDS[key] for key in keys]
        assert dict(transaction.cursor()) == RECORDS
    assert [entry.name for entry in path.iterdir()] == ["data.mdb"], "it made no file for a lock"


def test_lmdb_says_so_if_it_is_to_write_on_a_read_only_mount(loaded: Site) -> None:
    with pytest.raises(lmdb.Error, match="Read-only file system"):
        lmdb.open(str(loaded.mountpoint / "lmdb"), lock=False)


def test_lmdb_leaves_a_lock_file_in_a_writable_source_unless_told_not_to(site: Site) -> None:
    with lmdb.open(str(site.files / "lmdb")) as database, database.begin(write=True) as new:
        new.put(b"key", b"value")
    (site.files / "lmdb/lock.mdb").unlink()
    site.mount("--rw")

    def read(lock: bool) -> bytes | None:
        path = str(site.mountpoint / "lmdb")
        with lmdb.open(path, readonly=True, lock=lock) as database, database.begin() as old:
            return old.get(b"key")

    assert read(lock=False) == b"value"
    assert not (site.mountpoint / "lmdb/lock.mdb").exists()
    assert read(lock=True) == b"value"
    assert (site.mountpoint / "lmdb/lock.mdb").exists()
    eventually((site.files / "lmdb/lock.mdb").exists)


# webdataset leaves the end of its files to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_webdataset_gives_all_samples_of_its_shards(loaded: Site) -> None:
    shards = [str(loaded.mountpoint / f"train-{shard:06}.tar") for shard in range(4)]
    samples = WebDataset(shards, shardshuffle=False, empty_check=False)
    found = {sample["__key__"].encode(): sample["jpg"] for sample in samples}
    assert found == RECORDS


def test_a_mapped_array_gives_its_rows_at_random(loaded: Site) -> None:
    mapped = np.load(loaded.mountpoint / "matrix.npy", mmap_mode="r")
    rows = list(range(len(mapped)))
    random.Random(4).shuffle(rows)
    whole = TENSORS["layers.4.weight"]
    assert all(np.array_equal(mapped[row], whole[row], equal_nan=True) for row in rows)


@pytest.mark.parametrize("memory_map", [False, True])
def test_parquet_gives_some_columns(loaded: Site, memory_map: bool) -> None:
    path = loaded.mountpoint / "table.parquet"
    found = parquet.read_table(path, columns=["c3", "c11"], memory_map=memory_map)
    assert found.equals(table().select(["c3", "c11"]))


def test_a_mapped_arrow_stream_gives_its_rows_at_random(loaded: Site) -> None:
    """`datasets` reads so."""
    rows = random.Random(5).sample(range(ROWS), 200)
    with pa.memory_map(str(loaded.mountpoint / "rows.arrow")) as source:
        with contextlib.closing(pa.ipc.open_stream(source)) as stream:
            found = stream.read_all()
        assert found.take(rows).equals(table().take(rows))
        del found
