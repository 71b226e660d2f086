"""Read and change the labels of a Node, as the service account of this pod.

A pod finds the API server in two variables of its environment, and its token and the server's CA in
a directory ("Accessing the Kubernetes API from a Pod" in the documents of Kubernetes).
"""

import http.client
import json
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError, UsageError
from cachefs.foreign_numbers import whole_number

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_TIMEOUT_S = 10.0
_MOST_BYTES = 4 << 20
"""The most bytes of an answer. Kubernetes limits an object to about 1.5 MiB."""
_MOST_TOKEN_BYTES = 64 << 10
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class ApiServer:
    """The API server of the cluster, for the labels of one Node."""

    def __init__(self, node: str, account: Path = ACCOUNT) -> None:
        """Raises `UsageError` if this is no pod, or `node` can't be the name of a Node."""
        if not _NODE.fullmatch(node):
            raise UsageError(f"{node[:80]!r} can't be the name of a Node")
        self._host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = whole_number(os.environ.get("KUBERNETES_SERVICE_PORT", ""))
        if not self._host or port is None:
            raise UsageError("KUBERNETES_SERVICE_HOST and _PORT are not set: this is no pod")
        self._port = port
        self._account = account
        self._path = f"/api/v1/nodes/{node}"

    def labels(self) -> dict[str, str]:
        """Return the labels of the Node. Raises `CachefsError`."""
        return _labels_in(self._request("GET", None, "application/json"))

    def change_labels(self, changes: Mapping[str, str | None]) -> None:
        """Set labels of the Node; None removes one. Others stay (a merge patch, RFC 7396). Raises
        `CachefsError`."""
        body = json.dumps({"metadata": {"labels": dict(changes)}})
        self._request("PATCH", body, "application/merge-patch+json")

    def _request(self, method: str, body: str | None, content_type: str) -> object:
        what = f"{method} {self._path} at the API server"
        try:
            with (self._account / "token").open("rb") as stream:
                token = stream.read(_MOST_TOKEN_BYTES).decode("ascii").strip()
            trust = ssl.create_default_context(cafile=self._account / "ca.crt")
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=_TIMEOUT_S, context=trust
            )
            try:
                headers = {
                    "Accept": "application/json",
                    "Authorization": f"Bearer {token}",
                    "Content-Type": content_type,
                }
                connection.request(method, self._path, body, headers)
                answer = connection.getresponse()
                content = answer.read(_MOST_BYTES + 1)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CachefsError(f"{what} failed: {_why(error)}") from None
        if answer.status in {401, 403}:
            raise CachefsError(
                f"{what} is not allowed ({answer.status}); the service account of this pod needs "
                "the verbs get and patch for nodes"
            )
        if answer.status != 200 or len(content) > _MOST_BYTES:
            raise CachefsError(f"{what} failed with status {answer.status}")
        try:
            found: object = json.loads(content)
        except (ValueError, RecursionError):
            raise CachefsError(f"{what} returned no valid JSON") from None
        return found


def _why(error: Exception) -> str:
    """Return the reason without the token, which some errors of `http.client` show."""
    if isinstance(error, OSError):
        return str(error.strerror or error).partition("\n")[0][:200]
    return type(error).__name__


def _labels_in(node: object) -> dict[str, str]:
    metadata: Any = node.get("metadata") if isinstance(node, dict) else None
    labels = (metadata.get("labels") or {}) if isinstance(metadata, dict) else None
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise CachefsError("the API server returned something that is not a Node")
    return labels
