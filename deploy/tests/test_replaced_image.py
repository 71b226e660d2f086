"""A container of the image is replaced while other containers read: a keeper holds the mount."""

import hashlib
import json
import os
import time

from deploy.tests.bare import eventually
from deploy.tests.test_image import Host, host, is_mounted, is_stopped

__all__ = ["host"]  # the fixture

READERS = 4
PAUSE_BAR_S = 3.0
PYTHON = "/usr/lib/cachefs/bin/python3.11"
READER = """
import hashlib, json, os, random, sys, time
known = json.load(open("/source/known"))
reads, longest, errors = 0, 0.0, []
while not os.path.exists("/source/stop"):
    name, began = random.choice(sorted(known)), time.monotonic()
    try:
        with open(f"/mnt/cachefs/data/{name}", "rb") as file:
            data = file.read()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if hashlib.sha256(data).hexdigest() != known[name]:
            errors.append(f"{name}: wrong bytes")
    except OSError as error:
        errors.append(str(error))
    reads, longest = reads + 1, max(longest, time.monotonic() - began)
    if reads == 10:
        open(f"/source/begun-{sys.argv[1]}", "w").close()
with open(f"/source/result-{sys.argv[1]}", "w") as file:
    json.dump({"reads": reads, "longest_s": longest, "errors": errors}, file)
os.rename(f"/source/result-{sys.argv[1]}", f"/source/done-{sys.argv[1]}")
"""


def mount(host: Host) -> None:
    options = ["--cache-size", "64MiB", "--free-space-ratio", "0", "--metrics", "off"]
    options += ["--foreground", "--keeper", "/run/cachefs/keeper.sock"]
    command = ["mount", "file:///source/files", "/mnt/cachefs/data", *options]
    host.start("daemon", command, "rshared", privileged=True)


def test_a_replaced_container_is_a_pause(host: Host) -> None:
    source = host.directory / "source"
    (host.directory / "mounts/data").mkdir()
    (source / "files").mkdir()
    known = {}
    for number in range(100):
        data = os.urandom(2_000 * number + 1)
        (source / "files" / str(number)).write_bytes(data)
        known[str(number)] = hashlib.sha256(data).hexdigest()
    (source / "known").write_text(json.dumps(known))
    (source / "reader.py").write_text(READER)

    def all_readers(what: str) -> bool:
        return all((source / f"{what}-{number}").exists() for number in range(READERS))

    host.start("keeper", ["keeper"], "rshared", privileged=True)
    eventually((host.directory / "run/keeper.sock").exists)
    mount(host)
    eventually(lambda: is_mounted(host))
    run = f"for n in 0 1 2 3; do {PYTHON} /source/reader.py $n & done; wait"
    host.start("reader", ["/bin/sh", "-c", run], "rslave", privileged=False)
    eventually(lambda: all_readers("begun"))
    for how in ("TERM", "KILL", "TERM", "KILL"):
        host.runc("kill", "daemon", how)
        eventually(lambda: is_stopped(host))
        host.delete("daemon")
        mount(host)
        eventually(lambda: host.log("keeper").count("is kept") > host.log("keeper").count("waits"))
        time.sleep(1.0)  # the readers read
    (source / "stop").touch()
    eventually(lambda: all_readers("done"))
    found = [json.loads((source / f"done-{number}").read_text()) for number in range(READERS)]
    longest_s = max(each["longest_s"] for each in found)
    print(f"{sum(each['reads'] for each in found)} reads, the longest {longest_s:.2f} s")
    assert [each["errors"] for each in found] == [[]] * READERS
    assert longest_s < PAUSE_BAR_S
    # In the background: with the first process of its container, this one is killed.
    host.runc("exec", "--detach", "daemon", "cachefs", "umount", "--lazy", "/mnt/cachefs/data")
    eventually(lambda: is_stopped(host))
    assert not is_mounted(host)
