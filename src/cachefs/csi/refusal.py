"""The error of a call, with its code."""

from typing import Literal

from cachefs.errors import CachefsError

Code = Literal[
    "ABORTED",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNAVAILABLE",
]
"""Names of gRPC status codes, with the meanings that the CSI specification gives them."""


class Refusal(CachefsError):
    """A call can't be done. `code` says of which kind the reason is, the text is for a user.

    After most codes the kubelet takes a call for finished, and may undo what an earlier call for
    the same volume did. After UNAVAILABLE and ABORTED it only tries again (`isFinalError` in the
    kubelet's csi_client.go).
    """

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code: Code = code
