"""Stores with several addresses, and with others after a while."""

import subprocess
import sys
from pathlib import Path

import pytest

_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* "store.test" has the addresses in the file $ADDRESSES, one in each line. */
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    if (node == NULL || strcmp(node, "store.test")) return real(node, service, hints, found);
    FILE *file = fopen(getenv("ADDRESSES"), "r");
    char line[64];
    struct addrinfo all = *hints;
    all.ai_family = AF_UNSPEC;
    *found = NULL;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\\n")] = 0;
        if (real(line, service, &all, found)) return EAI_NONAME;
        while (*found)
            found = &(*found)->ai_next;
    }
    fclose(file);
    return 0;
}
"""
_USE = """
import os
from functools import partial
from pathlib import Path
import trio
from cachefs.errors import OriginUnavailableError
from cachefs.origin.open_origin import OriginOptions, open_origin

ADDRESSES = Path(os.environ["ADDRESSES"])
LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(LISTING)

async def answer(stream):
    while await stream.receive_some():
        await stream.send_all(HEAD + LISTING)

async def serve(nursery, host, port):
    scope = trio.CancelScope()
    async def run(task_status):
        with scope:
            await trio.serve_tcp(answer, port, host=host, task_status=task_status)
    return (await nursery.start(run))[0].socket.getsockname()[1], scope

async def main():
    async with trio.open_nursery() as nursery:
        port, first = await serve(nursery, "127.0.0.1", 0)
        options = OriginOptions(f"http://store.test:{port}", anonymous=True, addressing="path")
        for addresses in ("127.0.0.1", "127.0.0.9\\n127.0.0.1", "::1\\n127.0.0.9\\n127.0.0.1"):
            ADDRESSES.write_text(addresses)
            origin = open_origin("s3://b", options)
            await origin.check()
            print(addresses.split())
        first.cancel()
        await serve(nursery, "127.0.0.2", port)
        ADDRESSES.write_text("127.0.0.2")
        with trio.fail_after(30):
            while True:
                try:
                    await origin.check()
                    break
                except OriginUnavailableError:
                    await trio.sleep(0.1)
        print("moved")
        nursery.cancel_scope.cancel()

trio.run(main)
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """A library that answers look-ups of one name."""
    built = tmp_path / "shim.so"
    compiler = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(built), "-ldl"]
    subprocess.run(compiler, input=_SHIM, text=True, check=True)
    return built


@pytest.mark.long
def test_addresses_that_refuse_and_a_name_that_moves(shim: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "env",
            f"LD_PRELOAD={shim}",
            f"ADDRESSES={tmp_path / 'addresses'}",
            sys.executable,
            "-c",
            _USE,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["moved"], done
