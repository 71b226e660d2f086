"""The daemon of a supervised mount: `python -m cachefs.daemon.supervised FD`.

`cachefs.supervisor` starts it, never a user. FD is the daemon's end of the channel to the
supervisor. The supervisor may be of an earlier version and starts this module by name: see
`supervisor.channel`.
"""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from cachefs import __version__
from cachefs.config import from_json
from cachefs.daemon.log_setup import set_up_log
from cachefs.errors import CachefsError, RelayUnusableError, UsageError
from cachefs.log import collected_warnings, set_debugging
from cachefs.supervisor.channel import Channel
from cachefs.supervisor.link import Link

_MOST_WARNINGS = 5

_logger = logging.getLogger("cachefs.daemon.supervised")  # else it is "__main__"


def main() -> NoReturn:
    """Serve until the supervisor ends the daemon. Never returns: exits the process."""
    gc.disable()  # imports leave hardly any garbage; `daemon.run` enables it
    faulthandler.enable()  # the supervisor ends a stuck daemon with SIGABRT: show where it hangs
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor handles them
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    link = Link(Channel(socket.socket(fileno=fd)))
    code = 1
    try:
        _serve(link)
        code = 0
    except RelayUnusableError as error:
        link.fall_back(str(error))
    except CachefsError as error:
        _logger.debug("the daemon could not start", exc_info=error)
        code = 2 if isinstance(error, UsageError) else 1
        link.failed(str(error), code)
    except BaseException as error:
        _logger.exception("the daemon failed")
        link.failed(f"internal error: {type(error).__name__}: {error}; the log shows where", 1)
    finally:
        logging.shutdown()
        # Threads that wait for a silent origin must not delay the next daemon.
        os._exit(code)


def _serve(link: Link) -> None:
    from cachefs.fuse.relay import _relay  # must load before pyfuse3 loads libfuse

    from cachefs.daemon.live_changes import with_changes  # isort: skip
    from cachefs.daemon.run import run

    start = link.hello(__version__, _relay.FORMAT)
    with collected_warnings(_MOST_WARNINGS) as warnings:
        config = from_json(start.config)
        set_up_log(config)
        try:
            config = with_changes(config, start.changes)
        except UsageError as error:
            _logger.warning("changes that were made while mounted are lost: %s", error)
        set_debugging(config.debug)
        run(
            config,
            lambda: link.ready(warnings),
            data_path=start.data_path(),
            link=link,
            has_crashed=start.suspect,
        )


if __name__ == "__main__":
    main()
