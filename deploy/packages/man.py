"""Writes man pages from the texts of `--help`: python deploy/packages/man.py DIRECTORY.

`cachefs` and each of its commands get a page of section 1, `mount.cachefs` one of section 8.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from cachefs import __version__
from cachefs.cli import main
from cachefs.cli.mount_helper import command as mount_helper


class _Roff(click.HelpFormatter):
    """Collects what a command writes into its help, as roff (man(7))."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f".B {_escaped(prog)}\n{_escaped(args)}\n")

    def write_heading(self, heading: str) -> None:
        self.write(f".SH {_escaped(heading.upper())}\n")

    def write_paragraph(self) -> None:
        self.write(".PP\n")

    def write_text(self, text: str) -> None:
        for number, paragraph in enumerate(text.split("\n\n")):
            if number:
                self.write(".PP\n")
            if paragraph.startswith("\b\n"):  # click's sign for lines that stay as they are
                self.write(f".nf\n{_escaped(paragraph[2:])}\n.fi\n")
            else:
                self.write(f"{_escaped(' '.join(paragraph.split()))}\n")

    def write_dl(self, rows: object, col_max: int = 30, col_spacing: int = 2) -> None:
        for term, text in rows:  # type: ignore[attr-defined]
            self.write(f".TP\n.B {_escaped(term)}\n{_escaped(' '.join(text.split()))}\n")


def _escaped(text: str) -> str:
    """Protect what roff would read as its own: backslashes, hyphens, and a dot or quote that
    begins a line."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def _commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield `command` and all commands below it, each with its context."""
    context = click.Context(command, parent, name, **command.context_settings)
    yield command, context
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            found = command.get_command(context, verb)
            if found is not None and not found.hidden:
                yield from _commands(found, verb, context)


def page(command: click.Command, context: click.Context, section: int = 1) -> str:
    """Return the page of one command, in roff."""
    name = context.command_path.replace(" ", "-")
    roff = _Roff()
    roff.write(f'.TH {_escaped(name.upper())} {section} "" "cachefs {__version__}"\n')
    short = command.get_short_help_str(200).removesuffix(".")
    roff.write(f".SH NAME\n{_escaped(name)} \\- {_escaped(short)}\n.SH SYNOPSIS\n")
    command.format_usage(context, roff)
    roff.write(".SH DESCRIPTION\n")
    roff.write_text((command.help or "").replace("\n    ", "\n").strip())
    command.format_options(context, roff)
    others = _see_also(command, context)
    if others:
        listed = ", ".join(f"\\fB{_escaped(other)}\\fR({part})" for other, part in others)
        roff.write(f".SH SEE ALSO\n{listed}\n")
    return roff.getvalue()


def _see_also(command: click.Command, context: click.Context) -> list[tuple[str, int]]:
    name = context.command_path.replace(" ", "-")
    if isinstance(command, click.Group):
        return [(f"{name}-{verb}", 1) for verb in command.list_commands(context)]
    if context.parent is None:
        return [("cachefs-mount", 1)]
    return [(context.parent.command_path.replace(" ", "-"), 1)]


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    found = {
        f"{context.command_path.replace(' ', '-')}.1": page(command, context)
        for command, context in _commands(main, "cachefs")
    }
    helper = click.Context(mount_helper, None, "mount.cachefs", **mount_helper.context_settings)
    found["mount.cachefs.8"] = page(mount_helper, helper, 8)
    return found


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text, "utf-8")
