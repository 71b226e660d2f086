"""Set up logging. All modules use the standard `logging` module, with one line per record."""

import json
import logging
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TextIO

from cachefs.errors import UsageError
from cachefs.trusted_path import open_file

ROOT_LOGGER = "cachefs"
MAX_WARN_KEYS = 4096
"""The most keys that `warn_once` stores. Beyond it, new keys log nothing, to bound the memory."""
_PERMISSIONS = 0o600
"""The log may contain names of files that other users may not list."""
KEPT_FILES = 3
"""The number of old log files beside the current one: FILE.1 is the newest."""

_SYSLOG_LEVELS = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

_logger = logging.getLogger(__name__)
_warned: set[tuple[str, object]] = set()


class LineFormatter(logging.Formatter):
    """One line per record, in UTC. Line ends inside a record become " | ".

    Without `tracebacks`, an exception appears only with its type and text. `journal` omits time and
    level, which journald records itself.
    """

    converter = staticmethod(time.gmtime)

    def __init__(self, tracebacks: bool, *, journal: bool = False) -> None:
        stamp = "" if journal else "%(asctime)s.%(msecs)03dZ %(levelname)s "
        super().__init__(f"{stamp}%(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())

    def formatException(self, ei: object) -> str:  # noqa: N802 # overrides logging's name
        if self._tracebacks:
            return super().formatException(ei)  # type: ignore[arg-type] # logging's exc_info
        error = ei[1] if isinstance(ei, tuple) else ei
        return f"{type(error).__name__}: {error}"


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC, RFC 3339), level, logger and message. For an exception
    also error and (with `tracebacks`) traceback."""

    converter = staticmethod(time.gmtime)

    def __init__(self, tracebacks: bool) -> None:
        super().__init__()
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        seconds = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["error"] = f"{type(error).__name__}: {error}"
            if self._tracebacks:
                fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _JournalPrefix(logging.Formatter):
    """Puts the priority before the lines of another formatter, as sd-daemon(3) describes."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        levels = (number for least, number in _SYSLOG_LEVELS if record.levelno >= least)
        return f"<{next(levels, 7)}>{self._inner.format(record)}"


class _LogFile(RotatingFileHandler):
    """A log file that is rotated at `max_bytes` (0: never), and created again after another process
    has renamed or removed it. stdout and stderr move to the new file if they led to the old one.
    The new file has the permissions of the old one."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._identity: tuple[int, int] | None = None
        self._permissions = _PERMISSIONS
        # A name may have bytes that are no UTF-8.
        super().__init__(
            path,
            maxBytes=max_bytes,
            backupCount=KEPT_FILES,
            encoding="utf-8",
            errors="backslashreplace",
        )

    def emit(self, record: logging.LogRecord) -> None:
        if _identity_of(self.baseFilename) != self._identity:
            self.close_stream()
        super().emit(record)

    def close_stream(self) -> None:
        """Close the file; the next record opens it again."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def doRollover(self) -> None:  # noqa: N802 # overrides logging's name
        try:
            super().doRollover()
        except OSError as error:
            self.maxBytes = 0  # otherwise each record would try to rename again
            _logger.warning("can't rename %s, so it grows: %s", self.baseFilename, error.strerror)

    def _open(self) -> IO[str]:  # type: ignore[override] # typeshed names the concrete class
        stream = open(  # noqa: SIM115 - the handler closes it
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=self._create,
        )
        self._permissions = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        before, self._identity = self._identity, _identity_of(stream.fileno())
        for fd in (1, 2):
            if before is not None and _identity_of(fd) == before:
                os.dup2(stream.fileno(), fd)
        return stream

    def _create(self, path: str, flags: int) -> int:
        return open_file(path, flags, self._permissions)


def _identity_of(file: str | int) -> tuple[int, int] | None:
    try:
        info = os.stat(file)  # noqa: PTH116 - descriptors too
    except OSError:
        return None
    return info.st_dev, info.st_ino


def setup(
    *,
    debug: bool = False,
    log_file: Path | None = None,
    tracebacks: bool = True,
    log_format: str = "text",
    max_bytes: int = 0,
) -> None:
    """Send the log to `log_file` (appended to), or to stderr. Replaces an earlier set-up.

    `debug` lowers the level from INFO to DEBUG. `log_format` is "text" or "json". The file rotates
    at `max_bytes`; 0 means never. Raises `UsageError` if the file can't be opened.
    """
    handler: logging.Handler
    if log_file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = _LogFile(open_log_file(log_file), max_bytes)
    journal = log_file is None and _is_journal(sys.stderr)
    formatter: logging.Formatter
    if log_format == "json":
        formatter = JsonFormatter(tracebacks or debug)
    else:
        formatter = LineFormatter(tracebacks or debug, journal=journal)
    handler.setFormatter(_JournalPrefix(formatter) if journal else formatter)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_debugging(debug)
    logging.captureWarnings(True)


def is_debugging() -> bool:
    """Return whether the log level is DEBUG, which logs every decision."""
    return logging.getLogger(ROOT_LOGGER).level == logging.DEBUG


def set_debugging(debug: bool) -> None:
    """Set the log level to DEBUG or INFO from now on."""
    logging.getLogger(ROOT_LOGGER).setLevel(logging.DEBUG if debug else logging.INFO)


def _is_journal(stream: TextIO) -> bool:
    """Return whether `stream` leads to journald (JOURNAL_STREAM in systemd.exec(5))."""
    wanted = os.environ.get("JOURNAL_STREAM", "")
    try:
        device, inode = _identity_of(stream.fileno()) or (0, 0)
    except (OSError, ValueError):  # the stream has no file descriptor
        return False
    return wanted == f"{device}:{inode}"


def open_log_file(path: Path) -> Path:
    """Create `path` and its directory if needed, and check that it can be appended to.

    Raises `UsageError`.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        os.close(open_file(path, flags, _PERMISSIONS, make=True))
    except OSError as error:
        raise UsageError(
            f"can't write the log file {path}: {error.strerror}; choose another with --log-file"
        ) from error
    return path


@contextmanager
def collected_warnings(most: int) -> Iterator[list[str]]:
    """Collect the first `most` warnings that are logged within the context, for the user who
    waits."""
    warnings: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(warnings) < most:
                warnings.append(" ".join(record.getMessage().split()))

    collector = Collector(logging.WARNING)
    logger = logging.getLogger(ROOT_LOGGER)
    logger.addHandler(collector)
    try:
        yield warnings
    finally:
        logger.removeHandler(collector)


def warn_once(
    logger: logging.Logger,
    key: object,
    message: str,
    *args: object,
    exc_info: BaseException | None = None,
) -> None:
    """Log a warning on the first call with this `logger` and `key` in this process.

    Use it for conditions that may occur on every request. `args` and `exc_info` work as in
    `logging`.
    """
    seen = (logger.name, key)
    if seen in _warned or len(_warned) >= MAX_WARN_KEYS:
        return
    _warned.add(seen)
    logger.warning(message, *args, exc_info=exc_info)


def forget_warnings() -> None:
    """Reset `warn_once`, so that it warns again about every key (for tests)."""
    _warned.clear()
