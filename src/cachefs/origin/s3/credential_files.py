"""Credentials as Kubernetes mounts a Secret: a directory with one file for each value.

    DIR/access_key_id  DIR/secret_access_key  DIR/session_token (optional)

Names are compared without case, `-`, `_` and `.`. They may begin with AWS, OSS, S3, ALIBABA_CLOUD
or ALIYUN. The usual synonyms are accepted (`accessKey`, `AWS_SECRET_ACCESS_KEY`, `secret-key`,
`security_token`, ...). Other files are ignored. Spaces and line ends around a value are removed.

The kubelet replaces a Secret by swapping the link `..data`. So the files are checked again before
they are used, at most once a second. Values that were read during a change are not used.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cachefs.errors import AccessDeniedError, UsageError
from cachefs.log import warn_once
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.credentials import Credentials, CredentialSource
from cachefs.trusted_path import read_secret

_LOOK_AGAIN_S = 1.0
_MAX_BYTES = 64 << 10
_TRIES = 5
_PREFIX = re.compile(r"^(aws|oss|s3|alibabacloud|aliyun)")
_WORDS = {
    "accesskeyid": "access_key_id",
    "accesskey": "access_key_id",
    "keyid": "access_key_id",
    "secretaccesskey": "secret_access_key",
    "accesskeysecret": "secret_access_key",
    "secretkey": "secret_access_key",
    "secret": "secret_access_key",
    "sessiontoken": "session_token",
    "securitytoken": "session_token",
    "token": "session_token",
}

log = logging.getLogger(__name__)

_Print = tuple[tuple[str, int, int, int], ...]
"""For each file the properties that change with its content: path, inode, mtime in ns, size."""


def open_credentials_dir(path: Path) -> "FileSource":
    """Return the source for a directory. Raises `UsageError` if it has no usable credentials."""
    source = FileSource(path)
    try:
        source.find()
    except AccessDeniedError as error:
        raise UsageError(str(error)) from None
    return source


class FileSource(CredentialSource):
    """Reads credentials from the files of one directory, again when they have changed. `_lock`
    protects all mutable fields."""

    def __init__(self, path: Path) -> None:
        self._dir = path
        self._lock = threading.Lock()
        self._looked_at = -_LOOK_AGAIN_S
        self._print: _Print = ()
        self._current: Credentials | None = None

    @property
    def advice(self) -> str:
        return f"see the files in {self._dir}"

    def has_changed(self) -> bool:
        """See `CredentialSource.has_changed`: `find` itself looks at the files."""
        return True

    def find(self) -> Credentials:
        """See `CredentialSource.find`. While new files are unusable, this returns the old ones."""
        with self._lock:
            now = time.monotonic()
            if self._current is not None and now - self._looked_at < _LOOK_AGAIN_S:
                return self._current
            self._looked_at = now
            try:
                self._look()
            except (OSError, AccessDeniedError) as error:
                problem = self._explain(error)
                if self._current is None:
                    raise AccessDeniedError(problem) from None
                warn_once(log, problem, "%s; going on with the old credentials", problem)
            assert self._current is not None
            return self._current

    def _look(self) -> None:
        gone: FileNotFoundError | None = None
        for _ in range(_TRIES):
            try:
                files = _files(self._dir)
                before = _fingerprint(files)
                if self._current is not None and before == self._print:
                    return
                texts = {word: _value(file) for word, file in files.items()}
                after = _fingerprint(_files(self._dir))
            except FileNotFoundError as error:
                gone = error  # perhaps the kubelet has just swapped the files
                continue
            if before == after:
                found = self._credentials_from(texts)
                if self._current is not None and found != self._current:
                    log.info("the credentials in %s have changed", self._dir)
                self._current, self._print = found, before
                return
        if gone is not None:
            raise gone
        raise AccessDeniedError(f"the files in {self._dir} change faster than they can be read")

    def _credentials_from(self, texts: dict[str, str]) -> Credentials:
        missing = [word for word in ("access_key_id", "secret_access_key") if not texts.get(word)]
        if missing:
            raise AccessDeniedError(
                f"{self._dir} has no credentials: {missing[0]} is missing or empty"
            )
        return Credentials(
            texts["access_key_id"],
            texts["secret_access_key"],
            texts.get("session_token") or None,
        )

    def _explain(self, error: Exception) -> str:
        if isinstance(error, OSError):
            name = error.filename or self._dir
            return f"credentials can't be read from {name}: {error.strerror}"
        return str(error)


def _files(path: Path) -> dict[str, Path]:
    """Return the file for each word. If there is a `..data` link, all files are from the directory
    it points to now."""
    generation = path / "..data"
    place = Path(os.path.realpath(generation)) if generation.is_symlink() else path
    found: dict[str, Path] = {}
    for name in sorted(os.listdir(place)):
        plain = re.sub(r"[-_.]", "", name).lower()
        word = _WORDS.get(plain) or _WORDS.get(_PREFIX.sub("", plain))
        if word is None or name.startswith(".") or not (place / name).is_file():
            continue
        if word in found:
            raise AccessDeniedError(
                f"{path} has two files for {word}, {found[word].name} and {name}: remove one"
            )
        found[word] = place / name
    return found


def _fingerprint(files: dict[str, Path]) -> _Print:
    stats = [(file, file.stat()) for file in files.values()]
    return tuple((str(f), s.st_ino, s.st_mtime_ns, s.st_size) for f, s in stats)


def _value(file: Path) -> str:
    """Return the value in a file. Raises `AccessDeniedError`, without the content in its message,
    if that is not ASCII."""
    data = read_secret(file, _MAX_BYTES)
    try:
        return data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise AccessDeniedError(f"{file} is no text: a key is plain ASCII") from None


def choose_source(
    options: OriginOptions, default: Callable[[OriginOptions], CredentialSource]
) -> CredentialSource | None:
    """Return the source that `--anonymous` (None) or `--credentials-dir` selects, else `default`.
    Raises `UsageError`."""
    if options.credentials_dir is None:
        return None if options.anonymous else default(options)
    if options.anonymous or options.profile:
        other = "--anonymous" if options.anonymous else "--profile"
        raise UsageError(f"--credentials-dir and {other} contradict each other: leave one out")
    return open_credentials_dir(options.credentials_dir)
