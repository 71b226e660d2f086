"""One-time tokens and sessions of the console: who may see names and act.

The control socket gives tokens, so only its owner gets one. A page exchanges its token once for a
session, and sends that with each request. Both are in the daemon's memory only, as digests: they
end with the daemon.
"""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

TOKEN_S = 60.0
"""How long a token can be exchanged."""

IDLE_S, SESSION_S = 3600.0, 12 * 3600.0
"""A session ends after one hour without a request, and after twelve hours in any case."""

_MOST_TOKENS, _MOST_SESSIONS = 16, 64
"""Above these numbers the oldest goes."""

_BYTES = 32


class Sessions:
    """The tokens and sessions of one daemon."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._tokens: OrderedDict[bytes, float] = OrderedDict()
        self._sessions: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def new_token(self) -> str:
        """Return a token, which `exchange` accepts once within `TOKEN_S`."""
        token = secrets.token_urlsafe(_BYTES)
        self._tokens[_digest(token)] = self._clock() + TOKEN_S
        _bound(self._tokens, _MOST_TOKENS)
        return token

    def exchange(self, token: str) -> str | None:
        """Return a new session for the token, which is used up; None if it is not valid."""
        given = _digest(token)
        found = _find(self._tokens, given)
        if found is None or self._tokens.pop(found) < self._clock():
            return None
        session = secrets.token_urlsafe(_BYTES)
        now = self._clock()
        self._sessions[_digest(session)] = now + SESSION_S, now + IDLE_S
        _bound(self._sessions, _MOST_SESSIONS)
        return session

    def is_valid(self, session: str) -> bool:
        """Return whether the session has begun and not ended. This counts as its use."""
        found = _find(self._sessions, _digest(session))
        if found is None:
            return False
        ends_at, idle_until = self._sessions[found]
        now = self._clock()
        if now > min(ends_at, idle_until):
            del self._sessions[found]
            return False
        self._sessions[found] = ends_at, now + IDLE_S
        return True

    def end(self, session: str) -> None:
        """End the session; does nothing if there is no such session."""
        self._sessions.pop(_digest(session), None)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _find(known: OrderedDict[bytes, Any], wanted: bytes) -> bytes | None:
    """Return the equal key. The time that this takes does not depend on how much is equal."""
    found = None
    for digest in known:
        if hmac.compare_digest(digest, wanted):
            found = digest
    return found


def _bound(known: OrderedDict[bytes, Any], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)
