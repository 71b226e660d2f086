"""Credentials for all requests.

They come from one `CredentialSource`: botocore's chain (environment, shared files, profiles,
container and instance roles), a few named variables, or a directory of files. One thread at a time
looks for new ones, while requests go on with those that are valid. botocore's own renewal is not
used: it asks for new ones before each request when a session lasts no longer than its windows of 10
and 15 minutes, and gives up valid ones when the agent that renews them is away. No message and no
`repr` contains a secret or a token."""

import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import botocore.session
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError

from cachefs.errors import CredentialsError, OriginError, UsageError

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
"""Files are looked at again when they are used after so long."""
_RENEW_AHEAD_S = 900.0
"""Temporary credentials are renewed so long before they end; shorter ones after half of the time
that is left. The agents of containers and instances have new ones at least 5 minutes before."""
_FORCED_S = 5.0
"""After a refusal of the store, credentials are looked for at most so often."""
_MOST_BACK_OFF_S = 10.0
_MOST_WAIT_S = 30.0
"""How long a request waits for credentials. A program that gives them may hang."""
_LOGGED_S = 60.0

ENDED_CODES = frozenset(
    (
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "TokenRefreshRequired",
        "SecurityTokenExpired",
    )
)
"""Codes of S3 and OSS for credentials that were valid."""
WRONG_CODES = frozenset(
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurityToken")
)
"""Codes for credentials that are wrong, or have been replaced."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """One set of credentials. `expires_at` is in seconds since the epoch, None without an end."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(repr=False)
    expires_at: float | None = field(default=None, compare=False)

    @property
    def is_sane(self) -> bool:
        """Whether the values fit into headers. Libraries would quote other values in errors."""
        texts = [self.access_key, self.secret_key, self.token or "none"]
        return all(t and t.isascii() and t.isprintable() and " " not in t for t in texts)


class CredentialSource(ABC):
    """A source of credentials."""

    @abstractmethod
    def find(self) -> Credentials | None:
        """Return the current credentials, or None if there are none. May block, so it must be
        called in a worker thread. Raises `OriginError` if the credentials can't be loaded."""

    def has_changed(self) -> bool:
        """Whether `find` may return others than last time, as far as files tell. May block."""
        return False

    @property
    @abstractmethod
    def advice(self) -> str:
        """Advice for messages: what the user can do if there are no usable credentials."""


class BotocoreSource(CredentialSource):
    """botocore's chain. Each `find` begins anew with what `new_session` returns, so it reads the
    files again and renews temporary credentials."""

    advice = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give a profile, or ask for anonymous "
        "access"
    )

    def __init__(self, new_session: Callable[[], Any]) -> None:
        self._new_session = new_session
        environment = botocore.session.Session()
        names = ("credentials_file", "config_file")
        paths = (environment.get_config_variable(name) for name in names)
        self._files = [Path(os.path.expandvars(path)).expanduser() for path in paths if path]
        self._seen: object = None

    def find(self) -> Credentials | None:
        try:
            self._seen = _fingerprint(self._files)
            found = self._new_session().get_credentials()
            frozen = found and _frozen(found)
        except UsageError as error:
            raise CredentialsError(str(error)) from None
        except (BotoCoreError, ClientError, OSError, ValueError, RuntimeError, KeyError) as error:
            raise CredentialsError(
                f"AWS credentials can't be loaded ({type(error).__name__}): check the profile, "
                "the role and AWS_ACCESS_KEY_ID"
            ) from None
        if not frozen or not frozen.access_key or not frozen.secret_key:
            return None
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token, _end_of(found))

    def has_changed(self) -> bool:
        """See `CredentialSource.has_changed`."""
        return _fingerprint(self._files) != self._seen


def _frozen(found: Any) -> Any:
    """Return the values that botocore has found, without a second request for those that end
    within its windows."""
    found._advisory_refresh_timeout = found._mandatory_refresh_timeout = 0
    return found.get_frozen_credentials()


def _end_of(found: Any) -> float | None:
    ends = getattr(found, "_expiry_time", None)  # botocore has no public name for it
    return ends.timestamp() if isinstance(ends, datetime) else None


def _fingerprint(files: list[Path]) -> list[tuple[int, int, int] | None]:
    """Return for each file what changes with its content; None for a file that can't be seen."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            info = file.stat()
            found.append((info.st_ino, info.st_mtime_ns, info.st_size))
        except OSError:
            found.append(None)
    return found


class VariableSource(CredentialSource):
    """Reads the first pair of environment variables that is set. `names` holds the names of the
    variables for id, secret and token."""

    def __init__(self, names: tuple[tuple[str, str, str], ...]) -> None:
        self._names = names

    def find(self) -> Credentials | None:
        for id_name, secret_name, token_name in self._names:
            access_key, secret = os.environ.get(id_name), os.environ.get(secret_name)
            if access_key and secret:
                return Credentials(access_key, secret, os.environ.get(token_name) or None)
        return None

    @property
    def advice(self) -> str:
        id_name, secret_name, _ = self._names[0]
        return f"set {id_name} and {secret_name}, name a --credentials-dir, or use --anonymous"


class CredentialProvider:
    """The credentials with which an origin signs requests. `source` None means anonymous access.
    Thread-safe; `_turn` protects all mutable fields, of which `at_hand` reads some without it."""

    def __init__(self, source: CredentialSource | None) -> None:
        self.anonymous = source is None
        self._source = source
        self._turn = threading.Condition()
        self._keys: tuple[ReadOnlyCredentials, float] | None = None
        """The present ones and their end, in seconds since the epoch."""
        self._renew_at = float("inf")
        self._look_at = float("-inf")
        """When to look again (monotonic)."""
        self._is_looking = False
        self._must_find = True
        self._failures = 0
        self._error = ""
        self._logged_at = float("-inf")
        self._forced_at = float("-inf")
        self._has_worked = False
        self._refused: tuple[ReadOnlyCredentials, str] | None = None

    def at_hand(self) -> ReadOnlyCredentials | None:
        """Return valid credentials if there are some, without waiting. None also means anonymous
        access. Now and then this begins a look for new ones in a thread."""
        keys = self._keys
        if keys is None or time.time() >= keys[1]:
            return None
        if time.monotonic() >= self._look_at:
            with self._turn:
                self._begin()
        return keys[0]

    def current(self) -> ReadOnlyCredentials | None:
        """Return the credentials in botocore's form, or None for anonymous access.

        Blocks while there are none and they are looked for, so it must be called in a worker
        thread. Raises `CredentialsError` if there are no usable credentials."""
        if self.anonymous:
            return None
        ends_at = time.monotonic() + _MOST_WAIT_S
        with self._turn:
            while True:
                if (found := self.at_hand()) is not None:
                    return found
                now = time.monotonic()
                if now >= ends_at:
                    raise CredentialsError("nothing has given credentials in time")
                if not self._is_looking:
                    if self._error and now < self._look_at:
                        raise CredentialsError(self._error)
                    self._begin()
                self._turn.wait(ends_at - now)

    def has_newer(self, used: ReadOnlyCredentials | None, code: str) -> bool:
        """Return whether a request can be sent again, because there are other credentials than
        those `used`, which the store has refused with this `code` (empty for an answer without
        one). Looks for them, but not each time, and blocks meanwhile."""
        if used is None:
            return False
        ends_at = time.monotonic() + _MOST_WAIT_S
        with self._turn:
            if code:
                self.note_refused(used, code)
            self._wait_while_looking(ends_at)
            if self._is_other(used):
                return True
            now = time.monotonic()
            if now >= self._forced_at + _FORCED_S:
                self._forced_at = now
                self._must_find = True
                self._begin()
                self._wait_while_looking(ends_at)
            return self._is_other(used)

    def note_refused(self, used: ReadOnlyCredentials | None, code: str) -> None:
        """Note the code with which the store has refused credentials."""
        if used is not None:
            self._refused = used, code

    def note_success(self) -> None:
        """Note that the store has accepted the credentials."""
        self._has_worked = True
        self._refused = None

    def are_at_fault(self, used: ReadOnlyCredentials | None, code: str) -> bool:
        """Return whether a refusal concerns credentials that have ended or been replaced, and no
        permission. An answer without a `code` counts as the last one that had one."""
        if not code and self._refused is not None and self._refused[0] == used:
            code = self._refused[1]
        return code in ENDED_CODES or (code in WRONG_CODES and self._has_worked)

    @property
    def are_missing(self) -> bool:
        """Whether requests must be signed, and there are no valid credentials at present."""
        return not self.anonymous and self.at_hand() is None

    @property
    def advice(self) -> str:
        return self._source.advice if self._source is not None else ""

    def _is_other(self, used: ReadOnlyCredentials) -> bool:
        found = self.at_hand()
        return found is not None and found != used

    def _wait_while_looking(self, ends_at: float) -> None:
        while self._is_looking and (left_s := ends_at - time.monotonic()) > 0:
            self._turn.wait(left_s)

    def _begin(self) -> None:
        """Begin to look for credentials in a thread, if none does. The caller has `_turn`."""
        if not self._is_looking:
            self._is_looking = True
            threading.Thread(target=self._look, name="credentials", daemon=True).start()

    def _look(self) -> None:
        """Look for new credentials, or only whether files have changed."""
        assert self._source is not None
        with self._turn:
            must_find, self._must_find = self._must_find, False
        problem, found = "", None
        try:
            if must_find or time.time() >= self._renew_at or self._source.has_changed():
                found = _usable(self._source)
        except OriginError as error:
            problem = str(error)
        except Exception as error:  # its text is not shown: it may quote an answer
            problem = f"credentials can't be loaded ({type(error).__name__})"
        with self._turn:
            if problem:
                self._fail(problem)
            else:
                self._take(found)
            self._is_looking = False
            self._turn.notify_all()

    def _take(self, found: Credentials | None) -> None:
        if found is not None:
            if self._failures:
                log.info("credentials could be loaded again")
            keys = ReadOnlyCredentials(found.access_key, found.secret_key, found.token)
            now, expires_at = time.time(), found.expires_at
            if expires_at is None:
                self._keys, self._renew_at = (keys, float("inf")), float("inf")
            else:
                self._keys = keys, expires_at
                self._renew_at = expires_at - min(_RENEW_AHEAD_S, (expires_at - now) / 2)
            self._failures, self._error = 0, ""
        self._look_at = time.monotonic() + _LOOK_AGAIN_S

    def _fail(self, problem: str) -> None:
        now = time.monotonic()
        self._failures += 1
        self._error, self._must_find = problem, True
        longest_s = min(_MOST_BACK_OFF_S, 2.0 ** min(self._failures, 10) / 2)
        self._look_at = now + longest_s * random.uniform(0.5, 1)
        left_s = self._keys[1] - time.time() if self._keys is not None else 0.0
        if left_s > 0 and now >= self._logged_at + _LOGGED_S:
            self._logged_at = now
            log.warning("%s; going on with the old credentials", problem)


def _usable(source: CredentialSource) -> Credentials:
    """Return the credentials of a source. Raises `OriginError`."""
    found = source.find()
    if found is None:
        raise CredentialsError(f"no credentials found: {source.advice}")
    if not found.is_sane:
        raise CredentialsError(
            "the credentials have spaces, line ends or other characters that no key has: "
            f"{source.advice}"
        )
    if found.expires_at is not None and found.expires_at <= time.time():
        raise CredentialsError(f"the credentials that were found have ended: {source.advice}")
    return found
