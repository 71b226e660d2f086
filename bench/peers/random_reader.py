"""Reads pieces of a large file at random, in a separate process. Run as a script:

    python -S random_reader.py PATH PIECE_BYTES FIRST_BYTE END_BYTE MOST_READS MOST_SECONDS SEED

It prints reads, bytes and seconds. Pieces are aligned to their size.
"""

import os
import random
import sys
import time


def main() -> None:
    path = sys.argv[1]
    piece, first, end, most_reads = map(int, sys.argv[2:6])
    most_s, chance = float(sys.argv[6]), random.Random(int(sys.argv[7]))
    fd = os.open(path, os.O_RDONLY)
    reads = total_bytes = 0
    began = time.monotonic()
    while reads < most_reads and time.monotonic() - began < most_s:
        offset = chance.randrange(first // piece, end // piece) * piece
        data = os.pread(fd, piece, offset)
        if len(data) != piece:
            sys.exit(f"{len(data)} bytes were read at {offset} instead of {piece}")
        reads += 1
        total_bytes += piece
    print(reads, total_bytes, time.monotonic() - began)


if __name__ == "__main__":
    main()
