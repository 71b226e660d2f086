"""Sets up the log of the processes of a mount."""

from pathlib import Path

from cachefs import log
from cachefs.config import MountConfig
from cachefs.mounts import default_log_file


def log_file_of(config: MountConfig) -> Path | None:
    """Return the log file of a mount; None means stderr (only for a mount in the foreground)."""
    if config.log_file is None and not config.foreground:
        return default_log_file(config.mountpoint)
    return config.log_file


def set_up_log(config: MountConfig) -> None:
    """Set up the log of this process. Raises `UsageError`."""
    log.setup(
        debug=config.debug,
        log_file=log_file_of(config),
        tracebacks=not config.foreground,
        log_format=config.log_format,
        max_bytes=config.log_max_size,
    )
