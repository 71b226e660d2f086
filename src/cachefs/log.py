"""Logging set-up. Everything goes through the standard `logging` module, one line per record."""

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

ROOT_LOGGER = "cachefs"
MAX_WARN_KEYS = 4096
"""Bound on what `warn_once` remembers; past it, it is silent rather than large."""
_PERMISSIONS = 0o600
"""Names of files that others may not list stand in the log."""
KEPT_FILES = 3
"""Log files kept beside the present one: FILE.1 is the youngest."""

_SYSLOG_LEVELS = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

_logger = logging.getLogger(__name__)
_warned: set[tuple[str, object]] = set()


class LineFormatter(logging.Formatter):
    """One line per record, in UTC. Line ends inside a record become " | ".

    Without `tracebacks` an exception is shown by its type and text only. `journal`: without time
    and level, which journald notes itself.
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
    """One JSON object per record: time (UTC, RFC 3339), level, logger, message, and, where there is
    one, error and (with `tracebacks`) traceback."""

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
    """Another formatter's lines with their priority in front, as sd-daemon(3) describes."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        levels = (number for least, number in _SYSLOG_LEVELS if record.levelno >= least)
        return f"<{next(levels, 7)}>{self._inner.format(record)}"


class _LogFile(RotatingFileHandler):
    """A file that is renamed at `max_bytes` (0: never) and begun anew, also when somebody else has
    renamed or removed it. stdout and stderr follow, where they led to it. A new one has the
    permissions of the one before."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._identity: tuple[int, int] | None = None
        self._permissions = _PERMISSIONS
        super().__init__(path, maxBytes=max_bytes, backupCount=KEPT_FILES, encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        if _identity_of(self.baseFilename) != self._identity:
            self.close_stream()
        super().emit(record)

    def close_stream(self) -> None:
        """The next record opens it anew."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def doRollover(self) -> None:  # noqa: N802 # overrides logging's name
        try:
            super().doRollover()
        except OSError as error:
            self.maxBytes = 0  # else each record would try it again
            _logger.warning("can't rename %s, so it grows: %s", self.baseFilename, error.strerror)

    def _open(self) -> IO[str]:  # type: ignore[override] # typeshed names the concrete class
        stream = open(  # noqa: SIM115 - the handler closes it
            self.baseFilename, self.mode, encoding=self.encoding, opener=self._create
        )
        self._permissions = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        before, self._identity = self._identity, _identity_of(stream.fileno())
        for fd in (1, 2):
            if before is not None and _identity_of(fd) == before:
                os.dup2(stream.fileno(), fd)
        return stream

    def _create(self, path: str, flags: int) -> int:
        return os.open(path, flags, self._permissions)


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

    `debug` lowers the level from INFO to DEBUG. `log_format` is "text" or "json". At `max_bytes`
    the file is rotated; 0 is never. Raises `UsageError` if the file can't be opened.
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
    logging.getLogger(ROOT_LOGGER).setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)


def is_debugging() -> bool:
    """Whether every decision is logged."""
    return logging.getLogger(ROOT_LOGGER).level == logging.DEBUG


def set_debugging(debug: bool) -> None:
    """From now on."""
    logging.getLogger(ROOT_LOGGER).setLevel(logging.DEBUG if debug else logging.INFO)


def _is_journal(stream: TextIO) -> bool:
    """Whether `stream` leads to journald (JOURNAL_STREAM in systemd.exec(5))."""
    wanted = os.environ.get("JOURNAL_STREAM", "")
    try:
        device, inode = _identity_of(stream.fileno()) or (0, 0)
    except (OSError, ValueError):  # no descriptor behind it
        return False
    return wanted == f"{device}:{inode}"


def open_log_file(path: Path) -> Path:
    """Make sure that `path` can be appended to, with its directory. Raises `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _PERMISSIONS))
    except OSError as error:
        raise UsageError(
            f"can't write the log file {path}: {error.strerror}; choose another with --log-file"
        ) from error
    return path


@contextmanager
def collected_warnings(most: int) -> Iterator[list[str]]:
    """The first warnings that are logged meanwhile, for the eyes of a user who waits."""
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
    """Log a warning the first time that `key` is seen by `logger` in this process.

    For what may happen on every request. `args` are formatted into `message` as logging does,
    `exc_info` is shown with it.
    """
    seen = (logger.name, key)
    if seen in _warned or len(_warned) >= MAX_WARN_KEYS:
        return
    _warned.add(seen)
    logger.warning(message, *args, exc_info=exc_info)


def forget_warnings() -> None:
    """Let `warn_once` warn anew about everything (for tests)."""
    _warned.clear()
