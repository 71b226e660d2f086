"""`cachefs console` opens the console of a mount in the browser."""

import html
import os
import webbrowser
from pathlib import Path

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.one_mount import the_mount
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.control.client import ask
from cachefs.mounts import socket_path


@click.command("console")
@click.argument("mountpoint", required=False)
@click.option("--no-browser", is_flag=True, help="Only print the link, and do not open it.")
@debug_option
def command(mountpoint: str | None, no_browser: bool) -> None:
    """Print a link to the console of the mount on MOUNTPOINT, or of the only one, and open it.

    The link contains a token, which works once and within a minute: with it, the page shows names
    of files, and can evict, pin, load, and change limits. Without a token everybody on this machine
    can open the page and see its figures.
    """
    place = the_mount(mountpoint)
    given = ask(socket_path(place), api.CONSOLE_TOKEN)
    url = f"http://{given['address']}/#token={given['token']}"
    say(url)
    if not no_browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(_redirection(socket_path(place).with_suffix(".console.html"), url).as_uri())


def _redirection(file: Path, url: str) -> Path:
    """Write a page that leads to `url`, and return its path. The command line of a browser is no
    secret, so the token must not be on it."""
    file.unlink(missing_ok=True)
    target = html.escape(url)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as stream:
        stream.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">')
    return file
