"""Shows cachefs on real input, in about a minute: `make demo`, or `python demo/demo.py`.

It uses a real S3 server, real files and the real command line. All files are in one temporary
directory, which is removed at the end, also after a failure or an interrupt (bench/sandbox.py).
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the sandbox exists, nothing is left
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import sandbox


def work(directory: Path) -> int:
    """Run the demo. The imports are here because they are slow: the sandbox then handles an
    interrupt in them."""
    from show import Show

    return Show(directory).run()


if __name__ == "__main__":
    sandbox.run("demo", work)
