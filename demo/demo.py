"""cachefs on real input, in about a minute: `make demo`, or `python demo/demo.py`.

A real S3 server, real files, the real command line. Everything lives in one temporary directory
and is gone afterwards, whether this ends well, fails or is interrupted (see bench/sandbox.py).
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the sandbox stands, there is no mess
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import sandbox


def work(directory: Path) -> int:
    """The show itself; its imports are slow, and nothing to be interrupted in."""
    from show import Show

    return Show(directory).run()


if __name__ == "__main__":
    sandbox.run("demo", work)
