"""The command line. `main` is the console script; each verb has a module, imported on first use.

This module imports nothing heavy, so that `cachefs --help` answers quickly.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import click.shell_completion

from cachefs import __version__
from cachefs.cli.output.standard_files import OutputError, prepare_standard_files
from cachefs.cli.output.text import say
from cachefs.errors import CachefsError, UsageError

_VERBS = {
    "cache": "Show or remove cache directories, mounted or not.",
    "check": "Verify a cache directory that no daemon uses, and repair it.",
    "completion": "Print the script that completes commands in a shell.",
    "console": "Show in the browser what a mount does.",
    "csi": "Show mounts in pods, as a CSI node plugin.",
    "du": "Show how much of each directory is cached.",
    "evict": "Drop files from the cache at once.",
    "fluid": "Serve the mounts that Fluid asks for, in its FUSE container.",
    "flush": "Send unsent files to the source, and wait.",
    "hint": "Say which files will be read, so that they are fetched before.",
    "info": "Show what files are, and how much of them is cached where.",
    "install-systemd": "Put the systemd units in place.",
    "keeper": "Keep mounts while their container is replaced.",
    "jobs": "Show, follow, cancel or resume load jobs.",
    "load": "Load files or directories into the cache.",
    "manifest": "Write lists of files for mount --manifest.",
    "metadata": "Copy what a mount knows about names to other nodes.",
    "mount": "Mount a bucket or directory tree, cached on local disk.",
    "node-report": "Print how much of each data set this node has cached.",
    "pin": "Keep cached files from being evicted.",
    "profile": "Show which requests are slow and which files are read most.",
    "refresh": "Ask the origin now whether files have changed.",
    "reload": "Read the configuration file of a mount again.",
    "set": "Change options of a running mount.",
    "shared": "Show or check the tier that nodes share.",
    "stats": "Print a line each second about the activity of a mount.",
    "status": "Show what is mounted, and the state of the caches.",
    "tier": "Show or change the cache tiers of a running mount.",
    "top": "Show live the activity of the mounts.",
    "umount": "Unmount, and wait until the daemon has ended.",
    "unpin": "Allow the eviction of pinned files again.",
    "upgrade": "Let the installed version of cachefs serve a mount.",
    "writes": "Show, save, send or drop files that the source does not have yet.",
}


COMPLETION_VARIABLE = "_CACHEFS_COMPLETE"
"""The variable by which the script of `cachefs completion` asks for completions."""

debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors."
)
"""The option of every command. The group below reads it, the commands themselves do not get it."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Verbs(click.Group):
    """The group of all verbs. It imports a command on use and is the only place that prints
    errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        gc.disable()  # imports leave hardly any garbage; the search took a tenth of their time
        try:
            module = importlib.import_module(f"cachefs.cli.{cmd_name.replace('-', '_')}")
        finally:
            gc.enable()
        command: click.Command = module.command
        return command

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the verbs that begin so, without an import of their modules."""
        if not incomplete.startswith("-"):
            item = click.shell_completion.CompletionItem
            return [
                item(verb, help=text)
                for verb, text in _VERBS.items()
                if verb.startswith(incomplete)
            ]
        return super().shell_complete(ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0].lower(), _VERBS, 1)
            fix = f"; did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"no such command {args[0]!r}{fix}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and exit with 0, 1 for a failure, 2 for wrong usage, or 130 when
        interrupted."""
        argv = sys.argv[1:] if args is None else list(args)
        prepare_standard_files()
        if COMPLETION_VARIABLE in os.environ:
            importlib.import_module("cachefs.cli.completion")  # it changes click's answers
        try:
            code = super().main(
                argv, prog_name or "cachefs", complete_var or COMPLETION_VARIABLE, False, **extra
            )
            sys.stdout.flush()
        except BaseException as error:
            if not standalone_mode or ("--debug" in argv and isinstance(error, Exception)):
                raise
            code = explain(error)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def explain(error: BaseException, program: str = "cachefs") -> int:
    """Print one line about `error` and return the exit code.

    Raises `error` again if it is neither an `Exception` nor an interruption.
    """
    match error:
        case click.Abort() | KeyboardInterrupt():
            text, code = "interrupted", 130
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return 2
        case click.UsageError():
            context = error.ctx.command_path if error.ctx else program
            text, code = f"{_sentence(error.format_message())} ({context} --help)", 2
        case click.ClickException():
            text, code = _sentence(error.format_message()), 1
        case UsageError():
            text, code = str(error), 2
        case CachefsError() | OutputError():
            text, code = str(error), 1
        case BrokenPipeError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        case Exception():
            text = f"internal error: {type(error).__name__}: {error} (--debug shows where)"
            code = 1
        case _:
            raise error
    with contextlib.suppress(OSError):  # then the exit code has to do
        say(f"{program}: error: {' '.join(text.split())}", err=True)
    return code


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:].removesuffix(".")


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cachefs", message="%(prog)s %(version)s")
def main() -> None:
    """Show an object store as files and cache them on local disk, for training data.

    \b
      cachefs mount s3://bucket/prefix /mnt/data
      cachefs status
      cachefs umount /mnt/data
    """
