"""Asynchronous O_DIRECT writes beside buffered readers, as in generic/451 of xfstests."""

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.mount.harness import Site

ROUNDS = 100
SIZE_BYTES = 640 << 10
NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Of io_setup, io_destroy, io_getevents and io_submit, which the C library does not have."""
WRITE = 1


class Iocb(ctypes.Structure):
    """`struct iocb` of linux/aio_abi.h."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("eventfd", ctypes.c_uint32),
    )


class Writer:
    """Writes a buffer to the begin of a file."""

    def __init__(self, fd: int, buffer: mmap.mmap) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._setup, self._destroy, self._getevents, self._submit = NUMBERS[platform.machine()]
        self._context = ctypes.c_ulong(0)
        assert self._call(self._setup, 1, ctypes.byref(self._context)) == 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._request = Iocb(opcode=WRITE, fd=fd, buffer=address, length=len(buffer))

    def write(self) -> None:
        requests = (ctypes.POINTER(Iocb) * 1)(ctypes.pointer(self._request))
        event = (ctypes.c_int64 * 4)()
        assert self._call(self._submit, self._context, 1, requests) == 1
        assert self._call(self._getevents, self._context, 1, 1, event, None) == 1
        assert event[2] == self._request.length

    def close(self) -> None:
        self._call(self._destroy, self._context)


@contextmanager
def read_again_and_again(path: os.PathLike[str]) -> Iterator[None]:
    stopped = threading.Event()

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            while not stopped.is_set():
                os.pread(file.fileno(), SIZE_BYTES, 0)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        stopped.set()
        for reader in readers:
            reader.join()


@pytest.mark.parametrize("data_path", ["relay", "python"])
def test_a_buffered_read_shows_what_a_direct_write_has_written(site: Site, data_path: str) -> None:
    site.mount("--rw", "--data-path", data_path)
    path = site.mountpoint / "file"
    path.write_bytes(bytes(SIZE_BYTES))
    buffer = mmap.mmap(-1, SIZE_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    writer = Writer(fd, buffer)
    stale = []
    with path.open("rb", buffering=0) as file, read_again_and_again(path):
        for number in range(1, ROUNDS + 1):
            buffer[:] = bytes([number]) * SIZE_BYTES
            writer.write()
            if os.pread(file.fileno(), SIZE_BYTES, 0) != buffer[:]:
                stale.append(number)
    writer.close()
    os.close(fd)
    site.umount()
    assert stale == []
