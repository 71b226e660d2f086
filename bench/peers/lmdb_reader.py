"""Gets records of an LMDB file at random over mmap, in a separate process. Run as a script:

    python lmdb_reader.py PATH RECORDS MOST_GETS MOST_SECONDS SEED

It opens the file like data loaders: read-only, no lock, no read-ahead. It prints gets, bytes and
seconds.
"""

import random
import sys
import time

import lmdb


def main() -> None:
    path, records, most_gets = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    most_s, chance = float(sys.argv[4]), random.Random(int(sys.argv[5]))
    gets = total_bytes = 0
    began = time.monotonic()
    database = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False)
    with database.begin() as transaction:
        while gets < most_gets and time.monotonic() - began < most_s:
            key = b"%08d" % chance.randrange(records)
            value = transaction.get(key)
            if value is None or not value.startswith(key):
                sys.exit(f"record {key!r} is not what was written")
            gets += 1
            total_bytes += len(value)
    print(gets, total_bytes, time.monotonic() - began)


if __name__ == "__main__":
    main()
