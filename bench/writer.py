"""Writes files like a worker of a job, in a separate process. Run as a script:

    python -S writer.py ROOT LIST FIRST STEP CLOSE|SYNC|RENAME

LIST contains lines of a path below ROOT and a size in bytes; this writer takes every STEP-th from
FIRST on. It prints "ready" and waits for a line on stdin. At the end it prints "done FILES BYTES
BEGAN ENDED" (CLOCK_MONOTONIC, the same for all processes). CLOSE writes each file and closes it.
SYNC also syncs it before, for a mount whose close waits for nothing. RENAME writes it under another
name, syncs, closes and renames it, as for a checkpoint. Files of more than 1 MiB are written in
pieces of 1 MiB.

It imports few modules and only the standard library, so that many writers start quickly.
"""

import os
import random
import sys
import time

_PIECE_BYTES = 1 << 20
_NOISE_BYTES = 16 << 20


def main() -> None:
    root, list_file, first, step, how = sys.argv[1:]
    with open(list_file, encoding="utf-8") as lines:
        chosen = lines.read().splitlines()[int(first) :: int(step)]
    files = [(os.path.join(root, name), int(size)) for name, _, size in map(_parts, chosen)]
    noise = memoryview(random.Random(first).randbytes(_NOISE_BYTES))
    _say("ready")
    sys.stdin.readline()
    began = time.monotonic()
    total_bytes = 0
    for number, (path, size_bytes) in enumerate(files):
        _write(path, size_bytes, noise, number, how)
        total_bytes += size_bytes
    _say(f"done {len(files)} {total_bytes} {began} {time.monotonic()}")


def _parts(line: str) -> tuple[str, str, str]:
    return line.rpartition(" ")


def _write(path: str, size_bytes: int, noise: memoryview, number: int, how: str) -> None:
    written = f"{path}.tmp" if how == "RENAME" else path
    fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        done = 0
        while done < size_bytes:
            length = min(size_bytes - done, _PIECE_BYTES)
            start = (number * 7919 + done) % (_NOISE_BYTES - _PIECE_BYTES)
            done += os.write(fd, noise[start : start + length])
        if how != "CLOSE":
            os.fsync(fd)
    finally:
        os.close(fd)
    if how == "RENAME":
        os.rename(written, path)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the parent process has ended
