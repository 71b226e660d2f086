"""The credentials for requests that are sent from the event loop."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio
from botocore.credentials import ReadOnlyCredentials

from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.credentials import CredentialProvider

T = TypeVar("T")

_THREADS = 4
"""The most threads that wait for credentials. A program that gives them may hang."""


class LoopCredentials:
    """The credentials of one origin. Only the loop may use it."""

    def __init__(self, provider: CredentialProvider) -> None:
        self.provider = provider
        self._threads = trio.CapacityLimiter(_THREADS)

    async def current(self) -> ReadOnlyCredentials | None:
        """Return the present credentials, or None for anonymous access. Raises `OriginError`."""
        found = self.provider.at_hand()
        if found is not None or self.provider.anonymous:
            return found
        return await self._in_thread(self.provider.current)

    async def can_sign_anew(
        self, used: ReadOnlyCredentials | None, method: str, status: int, body: bytes
    ) -> bool:
        """Do `errors.can_sign_anew`, which may wait for new credentials."""
        if status not in s3_errors.CREDENTIAL_STATUSES:
            return False
        check = partial(s3_errors.can_sign_anew, self.provider, used, method, status, body)
        return await self._in_thread(check)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
