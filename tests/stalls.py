"""Stop the whole process again and again for random times, as a machine does that has too little
CPU for it: `make test-stalls` loads this plugin. It finds tests, and code, that rely on time.

A thread holds the GIL while it sleeps, so nothing else of the process runs, and no CPU is used.
Threads of C without the GIL, which the relay has, go on.
"""

import ctypes
import random
import threading
import time

import pytest

_BETWEEN_S = 0.02
"""The mean of the times between two stalls."""

_SHORT_MS = (5, 10, 20, 40, 80, 80, 150)
_LONG_MS = (400, 800, 1500)
_LONG_SHARE = 0.03


def _stall_for_ever() -> None:
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the GIL during a call
    chance = random.Random()
    while True:
        time.sleep(chance.expovariate(1 / _BETWEEN_S))
        stalls_ms = _LONG_MS if chance.random() < _LONG_SHARE else _SHORT_MS
        libc.usleep(chance.choice(stalls_ms) * 1000)


def pytest_configure(config: pytest.Config) -> None:
    """Begin, except in the process that only hands tests out to workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        threading.Thread(target=_stall_for_ever, name="stalls", daemon=True).start()
