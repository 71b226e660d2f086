"""HTTP/1.1 with compiled threads, for all requests to a store.

The compiled part is linked with the libcurl of the system. Only mounts of sources that it reads
load it, so the others do without libcurl.
"""


def why_not() -> str | None:
    """Return why this machine can't send requests, and what to do; None if it can."""
    try:
        from cachefs.origin.http import _engine  # noqa: F401
    except ImportError as error:
        reason = " ".join(str(error).split()) or "the compiled part is missing"
        return (
            f"libcurl 7.87 or newer, with OpenSSL, is needed ({reason}): apt-get install libcurl4 "
            "(Debian 13: libcurl4t64)"
        )
    return None
