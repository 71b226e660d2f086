"""Credentials for all requests.

They come from one `CredentialSource`: botocore's chain (environment, shared files, profiles,
container and instance roles), a few named variables, or a directory of files. No message and no
`repr` contains a secret or a token."""

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError

from cachefs.errors import AccessDeniedError


@dataclass(frozen=True, slots=True)
class Credentials:
    """One set of credentials."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(repr=False)

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
        called in a worker thread. Raises `AccessDeniedError` if the credentials can't be loaded."""

    @property
    @abstractmethod
    def advice(self) -> str:
        """Advice for messages: what the user can do if there are no usable credentials."""


class BotocoreSource(CredentialSource):
    """botocore's chain, which renews temporary credentials before they expire. `_lock` protects the
    first look-up."""

    advice = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give a profile, or ask for anonymous "
        "access"
    )

    def __init__(self, session: Any) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._found: Any = None

    def find(self) -> Credentials | None:
        try:
            with self._lock:
                if self._found is None:
                    self._found = self._session.get_credentials()
            frozen = self._found and self._found.get_frozen_credentials()
        except (BotoCoreError, ClientError, OSError, ValueError) as error:
            raise AccessDeniedError(
                f"AWS credentials can't be loaded ({type(error).__name__}): check the profile, "
                "the role and AWS_ACCESS_KEY_ID"
            ) from None
        if not frozen or not frozen.access_key or not frozen.secret_key:
            return None
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)


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
    """The credentials with which an origin signs requests. `source` None means anonymous access."""

    def __init__(self, source: CredentialSource | None) -> None:
        self.anonymous = source is None
        self._source = source

    def current(self) -> ReadOnlyCredentials | None:
        """Return the credentials in botocore's form, or None for anonymous access.

        Blocks while a role is looked up or renewed, so it must be called in a worker thread. Raises
        `AccessDeniedError` if there are no usable credentials.
        """
        if self._source is None:
            return None
        found = self._found(self._source)
        return ReadOnlyCredentials(found.access_key, found.secret_key, found.token)

    @staticmethod
    def _found(source: CredentialSource) -> Credentials:
        found = source.find()
        if found is None:
            raise AccessDeniedError(f"no credentials found: {source.advice}")
        if not found.is_sane:
            raise AccessDeniedError(
                "the credentials have spaces, line ends or other characters that no key has: "
                f"{source.advice}"
            )
        return found
