"""Finds the CAs of the system, which sign the certificates of servers on the internet."""

import os
import ssl
from pathlib import Path

_LARGE_BYTES = 64 << 10


def system_cas() -> tuple[str | None, str | None]:
    """Return the file and the directories, separated by colons, of the CAs that OpenSSL trusts: its
    own, or those of SSL_CERT_FILE and SSL_CERT_DIR (SSL_CTX_load_verify_locations(3)). None for a
    file that is not there.

    libcurl reads a file once a day if there is no directory, and else for each connection, which
    takes 30 ms for the CAs of a whole system. So a large file is used without its directory.
    """
    known = ssl.get_default_verify_paths()
    file = Path(os.environ.get(known.openssl_cafile_env) or known.openssl_cafile)
    directories = os.environ.get(known.openssl_capath_env)
    if not file.is_file():
        return None, directories or known.openssl_capath
    is_large = file.stat().st_size > _LARGE_BYTES
    is_its_own = not directories or os.path.realpath(directories) == os.path.realpath(file.parent)
    if is_large and is_its_own:
        return str(file), None
    return str(file), directories or known.openssl_capath
