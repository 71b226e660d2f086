"""The only way in which text from outside reaches a terminal.

Names of files, sources of other mounts and errors of stores may have any characters: escape
sequences that a terminal obeys, line ends that forge a line of output, and controls that turn the
order of letters around.
"""

import click

from cachefs.foreign_text import escaped


def shown(text: str) -> str:
    """Return `text` on one line, with each character that is not printable as Python writes it:
    `\\x1b`, `\\n`, `\\u202e`. A byte that is no UTF-8 becomes `\\udcXX`."""
    return escaped(text)


def say(line: str = "", *, err: bool = False) -> None:
    """Print one line, as `shown`. Text of several lines that is all our own goes to
    `click.echo`."""
    click.echo(shown(line), err=err)
