"""What a supervisor is to serve."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """What is to be served, and how a daemon for it is started. `config` is for the daemon;
    `log_name` says where it logs, for errors."""

    mountpoint: Path
    nonempty: bool
    config: str
    command: Sequence[str]
    status: str
    log_name: str


def daemon_command() -> list[str]:
    """How a daemon of the installed version is started: the module keeps its name for ever, as
    supervisors of earlier versions start it, too. The working directory is no place for code."""
    warnings = [f"-W{option}" for option in sys.warnoptions]
    return [sys.executable, *warnings, "-P", "-m", "cachefs.daemon.supervised"]
