"""Test CAs, and certificates for 127.0.0.1 that they sign. Needs the program `openssl`.

No pytest here: bench uses it too.
"""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificates(NamedTuple):
    """PEM files: of a CA, and of a server with its key."""

    ca: Path
    server: Path
    key: Path


def make_certificates(directory: Path, ca_name: str = "test-ca") -> Certificates:
    """Make a CA of this name, and a certificate for 127.0.0.1, in the new directory `directory`."""
    directory.mkdir(parents=True)
    made = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    ca_key, request = directory / "ca.key", directory / "server.csr"
    extension = directory / "extension"
    extension.write_text("subjectAltName=IP:127.0.0.1\n")
    new_key = "-newkey rsa:2048 -nodes"
    sign = f"x509 -req -CA {made.ca} -CAkey {ca_key} -CAcreateserial -days 2"
    for command in (
        f"req -x509 {new_key} -keyout {ca_key} -out {made.ca} -days 2 -subj /CN={ca_name}",
        f"req {new_key} -keyout {made.key} -out {request} -subj /CN=127.0.0.1",
        f"{sign} -in {request} -extfile {extension} -out {made.server}",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return made
