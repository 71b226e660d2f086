"""The gRPC server on a Unix socket."""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from cachefs.csi.controller import Controller
from cachefs.csi.identity import Identity
from cachefs.csi.limited_calls import LimitedCalls
from cachefs.csi.node import Node
from cachefs.csi.refusal import Code, Refusal
from cachefs.csi.sources import Sources
from cachefs.csi.spec import csi_pb2
from cachefs.errors import CachefsError

_THREADS = 32
"""Calls at a time. A call waits at most for the limit of `LimitedCalls`."""
_END_S = 5.0

_logger = logging.getLogger(__name__)


class Server:
    """Serves the plugin on `socket` until `stop`."""

    def __init__(self, socket: Path, node_id: str, mounts: Path, limit_s: float) -> None:
        """`mounts` is the canonical directory of the mounts. Raises `CachefsError` if the socket
        can't be made."""
        calls = LimitedCalls(limit_s)
        sources = Sources(mounts, calls)
        self._stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(_THREADS, "csi"))
        self._server.add_generic_rpc_handlers(
            (
                _handlers("Identity", Identity()),
                _handlers("Controller", Controller(sources)),
                _handlers("Node", Node(node_id, sources, calls)),
            )
        )
        umask = os.umask(0o177)  # only root may connect
        try:
            self._server.add_insecure_port(f"unix://{socket}")
        except RuntimeError as error:
            raise CachefsError(f"can't listen on {socket}; is there a directory for it?") from error
        finally:
            os.umask(umask)

    def run(self) -> None:
        """Serve until `stop`, and then let calls under way end."""
        self._server.start()
        self._stopped.wait()
        self._server.stop(_END_S).wait()

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()


def _handlers(name: str, service: object) -> grpc.GenericRpcHandler:
    """Return the handlers of a service: its methods that have the names of the specification.

    gRPC answers all others with UNIMPLEMENTED.
    """
    description = csi_pb2.DESCRIPTOR.services_by_name[name]
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            _answering(getattr(service, method.name)),
            request_deserializer=getattr(csi_pb2, method.input_type.name).FromString,
            response_serializer=getattr(csi_pb2, method.output_type.name).SerializeToString,
        )
        for method in description.methods
        if hasattr(service, method.name)
    }
    return grpc.method_handlers_generic_handler(description.full_name, handlers)


def _answering(method: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    """Return a function that answers a call with what `method` returns, or with its error."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        code: Code = "INTERNAL"
        try:
            return method(request)
        except Refusal as refusal:
            code, text = refusal.code, str(refusal)
        except CachefsError as error:
            text = str(error)
        except OSError as error:
            text = f"{error.filename or 'a system call'}: {error.strerror}"
        except Exception as error:
            _logger.exception("a call failed with an internal error")
            text = f"internal error: {type(error).__name__}; the log of the plugin has more"
        return context.abort(grpc.StatusCode[code], " ".join(text.split()))  # it raises

    return answer
