"""Configuration files, and what a running mount is told to change (config/)."""

import json
from contextlib import suppress

from cachefs.config import load_changes, load_mount_config
from cachefs.config.load import load_table_in, mountpoint_in
from cachefs.errors import UsageError
from tests.fuzz.targets._support import check_text, directory

GROWING = {
    "comments": lambda count: b"# a\n" * (count // 4),
    "one comment": lambda count: b"#" * count,
    "keys": lambda count: b"".join(b"a%d=1\n" % n for n in range(count // 9)),
    "one text": lambda count: b"a = '" + b"x" * count + b"'",
    "texts without an end": lambda count: b'a = """' + b'\\"' * (count // 2),
    "a list": lambda count: b"a = [" + b"1," * (count // 2) + b"]",
    "tables": lambda count: b"".join(b"[t.a%d]\n" % n for n in range(count // 11)),
    "lists of tables": lambda count: b"[[tier]]\n" * (count // 9),
    "a deep key": lambda count: b"a." * (count // 2) + b"a=1",
    "deep lists": lambda count: b"a=" + b"[" * count,
    "digits": lambda count: b"a = " + b"1" * count,
}
MOST_BYTES = 1 << 20
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    with directory() as place:
        file = place / "c.toml"
        file.write_bytes(data)
        for understand in (
            lambda: load_mount_config("s3://b", "/mnt/m", {}, file),
            lambda: load_mount_config(None, None, {}, file),
            lambda: mountpoint_in(file),
            lambda: load_table_in(file),
        ):
            try:
                understand()
            except UsageError as error:
                check_text(error)
    try:
        changes = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(changes, dict):
        try:
            load_changes(changes)
        except UsageError:
            return


def _one_pass(data: bytes) -> None:
    with directory() as place, suppress(UsageError):
        file = place / "c.toml"
        file.write_bytes(data)
        mountpoint_in(file)


PARSERS = (_one_pass,)
"""What is measured with `GROWING`."""
