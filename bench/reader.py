"""Reads files like a worker of a training job, in a separate process. Run as a script:

    python -S reader.py ROOT LIST PASSES FIRST STEP WHOLE|PYTHON|CHUNKS

LIST contains paths below ROOT, one per line; this reader takes every STEP-th from FIRST on. It
prints "ready" and waits for a line on stdin. Then it prints "at FILES BYTES" from time to time, and
at the end "done FILES BYTES BEGAN ENDED" (CLOCK_MONOTONIC, the same for all processes). WHOLE reads
each file with open(2), fstat(2) and one read(2), as libraries in C do. PYTHON uses Python's open(),
which also checks whether every file is a terminal (an ioctl, and therefore a request on any FUSE
file system). CHUNKS reads in pieces of 1 MiB, as programs read a very large file.

It imports few modules and only the standard library, so that 64 readers start quickly.
"""

import os
import sys
import time

_REPORT_EVERY = 64
_REPORT_S = 0.1
_CHUNK_BYTES = 1 << 20


def main() -> None:
    root, list_file, passes, first, step, how = sys.argv[1:]
    with open(list_file, encoding="utf-8") as lines:
        names = lines.read().splitlines()[int(first) :: int(step)]
    paths = [os.path.join(root, name) for name in names]
    _say("ready")
    sys.stdin.readline()
    read = {"WHOLE": _read_whole, "PYTHON": _read_by_python, "CHUNKS": _read_chunks}[how]
    began = reported = time.monotonic()
    files = total_bytes = 0
    for _ in range(int(passes)):
        for path in paths:
            total_bytes += read(path)
            files += 1
            if files % _REPORT_EVERY == 0 and time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                _say(f"at {files} {total_bytes}")
    _say(f"done {files} {total_bytes} {began} {time.monotonic()}")


def _read_whole(path: str) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        size_bytes = os.fstat(fd).st_size
        got_bytes = len(os.read(fd, size_bytes))
        while 0 < got_bytes < size_bytes:
            piece = os.read(fd, size_bytes - got_bytes)
            if not piece:
                break
            got_bytes += len(piece)
        return got_bytes
    finally:
        os.close(fd)


def _read_by_python(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read())


def _read_chunks(path: str) -> int:
    buffer = bytearray(_CHUNK_BYTES)
    total_bytes = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total_bytes += count
    return total_bytes


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the parent process has ended
