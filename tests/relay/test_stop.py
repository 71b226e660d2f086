"""Python goes on while the relay ends."""

import subprocess
import sys

import pytest

from cachefs.fuse import relay

if relay.why_not() is not None:
    pytest.skip(str(relay.why_not()), allow_module_level=True)

_SCRIPT = """
import os, socket, struct, threading, time
from pathlib import Path

from cachefs.fuse.relay import _relay

pair = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
kernel, device = pair()
relay = _relay.Relay(device.fileno(), _relay.create_table(1 << 10), 2)
relay.start()
init = struct.pack("<IIQQIIII", 40 + 64, 26, 1, 0, 0, 0, 0, 0) + struct.pack("<IIII", 7, 36, 0, 0)
kernel.send(init + bytes(48))
first, daemon = pair()
relay.attach(first.fileno())
daemon.recv(200)  # so the relay has the request now
relay.detach()

full, peer = pair()
full.setblocking(False)
try:
    while True:
        full.send(bytes(1000))
except BlockingIOError:
    full.setblocking(True)

blocked = []

def attach():
    blocked.append(threading.get_native_id())
    relay.attach(full.fileno())  # holds the relay's lock until `full` has room for INIT

def sleeps(thread):
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"

attaching = threading.Thread(target=attach)
attaching.start()
seen = 0
while seen < 20:  # so it doesn't only wait for Python's lock
    time.sleep(0.005)
    seen = seen + 1 if blocked and sleeps(blocked[0]) else 0
stopping = threading.Thread(target=relay.stop)
stopping.start()
time.sleep(0.1)
assert stopping.is_alive()
while attaching.is_alive():
    peer.recv(2000)
    attaching.join(0.001)
stopping.join()
print("ended", flush=True)
os._exit(0)
"""


def test_python_goes_on_while_the_relay_stops() -> None:
    """Another thread holds the relay's lock, and only this process can make it release that."""
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("ended\n", "")
