"""The task of a supervisor."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """A mount to serve, and the command that starts a daemon for it.

    `config` is the daemon's configuration as JSON. `status` is shown by the service manager.
    `log_name` names the daemon's log in error messages. `keeper` is the socket of the keeper, None
    without one, and `view` what `config.view_key` returns.
    """

    mountpoint: Path
    nonempty: bool
    config: str
    command: Sequence[str]
    status: str
    log_name: str
    keeper: Path | None = None
    view: str = ""


def daemon_command() -> list[str]:
    """Return the command that starts a daemon of the installed version.

    The module must keep its name for ever, because supervisors of earlier versions start it, too.
    -P keeps code in the working directory from being imported. The commands of the Debian package
    run with -I, which also leaves out what the user has installed or set in PYTHONPATH.
    """
    warnings = [f"-W{option}" for option in sys.warnoptions]
    isolation = "-I" if sys.flags.isolated else "-P"
    return [sys.executable, *warnings, isolation, "-m", "cachefs.daemon.supervised"]
