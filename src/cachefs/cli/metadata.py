"""`cachefs metadata` exports a mount's cached metadata to a file and imports it again."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.one_mount import the_mount
from cachefs.cli.output.text import say
from cachefs.cli.views.progress import counting
from cachefs.control import api
from cachefs.control.client import ask, stream
from cachefs.mounts import socket_path

T = TypeVar("T")

_TIMEOUT_S = 60.0


@click.group("metadata")
def command() -> None:
    """Carry a mount's cached names, sizes and versions to other nodes.

    A new node that imports the file shows the whole tree without listing the origin. Imported
    entries keep their age: the mount asks the origin again when its TTLs end (--attr-ttl,
    --entry-ttl and --list-ttl; "indefinite" means never).

    \b
      cachefs load /mnt/data --metadata          # ask the origin once
      cachefs metadata export /mnt/data data.parquet
      cachefs metadata import /mnt/data data.parquet       # on other nodes
    """


@command.command("export")
@click.argument("mountpoint")
@click.argument("file")
@debug_option
def export(mountpoint: str, file: str) -> None:
    """Write all cached metadata of MOUNTPOINT to FILE, in Parquet."""
    # The daemon drops a client that doesn't read, and a busy machine needs seconds for this import.
    import pyarrow.parquet  # noqa: F401

    from cachefs.cli.files.metadata_file import MetadataWriter

    place = the_mount(mountpoint)
    began = time.monotonic()
    lines = stream(socket_path(place), api.METADATA_EXPORT)
    with closing(lines):
        head = next(iter(lines))
        with (
            MetadataWriter.open(Path(file), head) as writer,
            counting("entries", head["entries"]) as note,
        ):
            for piece in lines:
                writer.add(piece)
                note(writer.count)
    _say(f"{writer.count:,} entries of {head['source']} exported to {file}", began)


@command.command("import")
@click.argument("mountpoint")
@click.argument("file")
@debug_option
def import_(mountpoint: str, file: str) -> None:
    """Add the metadata in FILE to MOUNTPOINT, except where MOUNTPOINT has newer data."""
    from cachefs.cli.files.metadata_file import MetadataReader

    place = the_mount(mountpoint)
    began = time.monotonic()
    bound = 0
    with MetadataReader.open(Path(file)) as reader, counting("entries", reader.count) as note:
        for request in ahead(_requests(reader)):
            bound += ask(socket_path(place), api.METADATA_IMPORT, request, _TIMEOUT_S)["bound"]
            note(reader.done)
    _say(f"{reader.count:,} entries imported, {bound:,} of them new or changed", began)


def _requests(reader: Any) -> Iterator[dict[str, Any]]:
    identity = reader.identity
    yield {"identity": identity, "root": reader.root, "pieces": []}
    for pieces in reader.pieces():
        yield {"identity": identity, "pieces": pieces}


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the same items. A thread makes the next item while the caller uses the current one."""
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, items, None)
            yield item


def _say(text: str, began: float) -> None:
    say(f"{text} in {time.monotonic() - began:.1f} s")
