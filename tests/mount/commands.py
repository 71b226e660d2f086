"""`cachefs` commands from a process that has imported them: a new interpreter takes .3 s of CPU for
each, which was a quarter of the time of all tests.

The server forks for each command. The fork gets the arguments, the environment, the working
directory and the descriptors of the test, and runs `main` as the console script does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NoReturn

_VERBS = ("du", "evict", "info", "load", "metadata", "mount", "pin", "refresh", "set", "umount")
"""What tests run most. Others are imported when they are needed, as in a process of their own."""


class CommandServer:
    """The process that forks, and how to reach it."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, "-W", "error", "-m", __name__, str(its.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()])

    def run(
        self, args: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` with captured output."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"args": args, "environment": dict(environment), "cwd": os.getcwd()}
        with ours, its, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            fds = [its.fileno(), out.fileno(), err.fileno()]
            with tempfile.TemporaryFile() as body:
                body.write(json.dumps(request).encode())
                body.flush()
                socket.send_fds(self._socket, [b"command"], [*fds, body.fileno()])
            ours.settimeout(timeout_s)
            code = int(ours.recv(16))
            said = [os.pread(file.fileno(), 1 << 30, 0).decode() for file in (out, err)]
        return subprocess.CompletedProcess(list(args), code, *said)


@cache
def server() -> CommandServer:
    """The one of this process of the tests. It ends with it."""
    return CommandServer()


def _serve(requests: socket.socket) -> None:
    import importlib

    for verb in _VERBS:
        importlib.import_module(f"cachefs.cli.{verb}")
    importlib.import_module("cachefs.supervisor.supervisor")
    importlib.import_module("cachefs.fuse.relay")
    while True:
        text, fds, _, _ = socket.recv_fds(requests, 16, 4)
        if not text:
            return
        if os.fork() == 0:
            requests.close()
            _run(*fds)
        for fd in fds:
            os.close(fd)
        while _reap():
            pass


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _run(answer: int, out: int, err: int, body: int) -> NoReturn:
    """One command, in its fork."""
    code = 1
    try:
        request = json.loads(os.pread(body, 1 << 26, 0))
        os.dup2(out, 1)
        os.dup2(err, 2)
        for fd in (out, err, body):
            os.close(fd)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["cachefs", *request["args"]]
        from cachefs.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, str(code).encode())
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    _serve(socket.socket(fileno=int(sys.argv[1])))
