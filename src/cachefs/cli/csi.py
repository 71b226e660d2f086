"""`cachefs csi` is the node plugin for Kubernetes' Container Storage Interface."""

import os
import signal
from pathlib import Path

import click

from cachefs import log
from cachefs.cli import debug_option
from cachefs.errors import UsageError
from cachefs.units import parse_duration

_MOST_SOCKET_BYTES = 107
"""The longest path of a Unix socket (unix(7)), without the zero byte at its end."""
_MOST_NODE_ID_BYTES = 256


@click.command("csi")
@click.option(
    "--endpoint",
    metavar="unix:///PATH",
    required=True,
    help="The socket on which the kubelet calls the plugin.",
)
@click.option("--node-id", metavar="NAME", required=True, help="The name of this node.")
@click.option(
    "--mounts",
    type=click.Path(path_type=Path),
    default=Path("/mnt/cachefs"),
    show_default=True,
    help="The directory in which the daemons of this node mount.",
)
@click.option(
    "--timeout",
    metavar="DURATION",
    default="10s",
    show_default=True,
    help="How long a mount may take to answer.",
)
@debug_option
def command(endpoint: str, node_id: str, mounts: Path, timeout: str) -> None:
    """Show the mounts of this node in pods, as a CSI node plugin.

    The plugin mounts nothing itself: daemons do (a DaemonSet or systemd units), each on a directory
    in the one that --mounts names. A volume is such a mount, or a directory in it. See docs/CSI.md.
    """
    socket = parse_endpoint(endpoint)
    if not node_id or len(node_id.encode()) > _MOST_NODE_ID_BYTES:
        raise UsageError(f"--node-id has 1 to {_MOST_NODE_ID_BYTES} bytes, such as a host's name")
    limit_s = parse_duration(timeout)
    if not 0 < limit_s <= 60:
        raise UsageError("--timeout must be more than 0 and at most 60s: the kubelet waits 2 min")
    if os.geteuid() != 0:
        raise UsageError("cachefs csi mounts volumes in pods, so it must run as root")
    if not mounts.is_dir():
        raise UsageError(f"there is no directory {mounts}; name the one with the mounts (--mounts)")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would explain errors once more
    try:
        from cachefs.csi.server import Server
    except Exception as error:  # an ImportError, or protobuf's own error about its version
        raise UsageError(
            f"cachefs csi needs grpcio and protobuf ({error}): pip install 'cachefs[csi]'"
        ) from error
    log.setup(tracebacks=False)
    server = Server(socket, node_id, mounts.resolve(), limit_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.run()


def parse_endpoint(text: str) -> Path:
    """Return the path of the socket in `unix:///PATH`, `unix:/PATH` or `/PATH`.

    Raises `UsageError` for anything else.
    """
    path = text.removeprefix("unix:")
    if path.startswith("///"):
        path = path[2:]
    if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
        raise UsageError(f'"{text}" is no endpoint; write unix:///csi/csi.sock')
    if len(os.fsencode(path)) > _MOST_SOCKET_BYTES:
        raise UsageError(f"the path of the endpoint has more than {_MOST_SOCKET_BYTES} bytes")
    return Path(path)
