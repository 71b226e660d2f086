"""Reads files, compares their bytes and notes how long each took, in a separate process. Run as a
script:

    python -S timed_reader.py ROOT RIGHT LIST FIRST STEP PACE_S

LIST has a path below ROOT on each line, and after a space the path below RIGHT of a file with the
right bytes. This reader takes every STEP-th line from FIRST on. It prints "ready" and waits for a
line on stdin: the time (CLOCK_MONOTONIC) at which it begins. If PACE_S is not 0, it begins one read
every PACE_S seconds. It prints "at FILES" after each read, and at the end one line of JSON: for
each read when it began and how long it took; the paths with wrong bytes; and errors by name.

It imports few modules, so that many readers start quickly.
"""

import errno
import json
import os
import sys
import time


def main() -> None:
    root, right, list_file, first, step, pace = sys.argv[1:]
    with open(list_file, encoding="utf-8") as lines:
        pairs = [line.split(" ") for line in lines.read().splitlines()[int(first) :: int(step)]]
    print("ready", flush=True)
    begin_at = float(sys.stdin.readline())
    times: list[tuple[float, float]] = []
    wrong: list[str] = []
    errors: dict[str, int] = {}
    for number, (path, right_path) in enumerate(pairs):
        left_s = begin_at + number * float(pace) - time.monotonic()
        if left_s > 0 and (not number or float(pace)):
            time.sleep(left_s)
        began = time.monotonic()
        try:
            data = _read(f"{root}/{path}")
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            errors[name] = errors.get(name, 0) + 1
            continue
        finally:
            times.append((began, time.monotonic() - began))
            print(f"at {number + 1}", flush=True)
        if data != _read(f"{right}/{right_path}"):
            wrong.append(path)
    print(json.dumps({"times": times, "wrong": wrong, "errors": errors}), flush=True)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        pieces = []
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
