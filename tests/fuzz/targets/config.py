"""Configuration files, and what a running mount is told to change (config/)."""

import json

from cachefs.config import load_changes, load_mount_config
from cachefs.config.load import load_table_in, mountpoint_in
from cachefs.errors import UsageError
from tests.fuzz.targets._support import check_text, directory


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
