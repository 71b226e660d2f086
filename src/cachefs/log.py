"""Logging set-up. Everything goes through the standard `logging` module, one line per record."""

import logging
import sys
import time
from pathlib import Path

from cachefs.errors import UsageError

ROOT_LOGGER = "cachefs"
MAX_WARN_KEYS = 4096
"""Bound on what `warn_once` remembers; past it, it is silent rather than large."""

_warned: set[tuple[str, object]] = set()


class LineFormatter(logging.Formatter):
    """One line per record, in UTC. Line ends inside a record become " | ".

    Without `tracebacks` an exception is shown by its type and text only.
    """

    converter = staticmethod(time.gmtime)

    def __init__(self, tracebacks: bool) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())

    def formatException(self, ei: object) -> str:  # noqa: N802 # overrides logging's name
        if self._tracebacks:
            return super().formatException(ei)  # type: ignore[arg-type] # logging's exc_info
        error = ei[1] if isinstance(ei, tuple) else ei
        return f"{type(error).__name__}: {error}"


def setup(*, debug: bool = False, log_file: Path | None = None, tracebacks: bool = True) -> None:
    """Send the log to `log_file` (appended to), or to stderr. Replaces an earlier set-up.

    `debug` lowers the level from INFO to DEBUG. Raises `UsageError` if the file can't be opened.
    """
    handler: logging.Handler
    if log_file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = logging.FileHandler(open_log_file(log_file), encoding="utf-8")
    handler.setFormatter(LineFormatter(tracebacks=tracebacks or debug))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT_LOGGER).setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)


def open_log_file(path: Path) -> Path:
    """Make sure that `path` can be appended to, with its directory. Raises `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(
            f"can't write the log file {path}: {error.strerror}; choose another with --log-file"
        ) from error
    return path


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
