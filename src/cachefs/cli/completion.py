"""`cachefs completion` prints the script by which a shell completes commands of cachefs."""

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from cachefs.cli import COMPLETION_VARIABLE, main


class _OrFiles(ShellComplete):
    """Offers names of files where click has no completion.

    Paths are plain strings to click, which offers nothing for them. The shell then would not
    complete names of files, as it does without the script.
    """

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        found = super().get_completions(args, incomplete)
        if found or incomplete.startswith("-"):
            return found
        return [CompletionItem(incomplete, type="file")]


class _Bash(_OrFiles, BashComplete):
    name = "bash"


class _Zsh(_OrFiles, ZshComplete):
    name = "zsh"


class _Fish(_OrFiles, FishComplete):
    name = "fish"


_CLASSES: dict[str, type[ShellComplete]] = {
    shell.name: add_completion_class(shell) for shell in (_Bash, _Zsh, _Fish)
}


@click.command("completion", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(list(_CLASSES)))
def command(shell: str) -> None:
    """Print the script with which SHELL completes commands, options and names of files.

    \b
      bash    /etc/bash_completion.d/cachefs
      zsh     /usr/local/share/zsh/site-functions/_cachefs
      fish    /etc/fish/completions/cachefs.fish

    The Debian package has these scripts. Elsewhere, write the output to such a file.
    """
    click.echo(script(shell))


def script(shell: str) -> str:
    """Return the script for `shell`: bash, zsh or fish."""
    chosen = _CLASSES[shell](main, {}, "cachefs", COMPLETION_VARIABLE)
    # `source()` of click's class for bash would run bash to ask for its version.
    return chosen.source_template % chosen.source_vars()
