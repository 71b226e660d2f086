"""The standard files of a command. Output that can't be written is an error of its own, which ends
the command wherever it writes."""

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class OutputError(Exception):
    """The output can't be written. No `CachefsError`: a command that continues after those must not
    continue after this."""


class _Output(io.FileIO):
    """The file descriptor of stdout."""

    def write(self, data: "Buffer", /) -> int:
        """Raises `OutputError`, and `BrokenPipeError` if nobody reads any more. After an
        `OutputError`, what is still buffered goes to /dev/null."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise OutputError(f"the output can't be written: {error.strerror}") from error


def prepare_standard_files() -> None:
    """Make errors of stdout known as such, and open standard files that are closed, so that no
    other file gets their numbers.

    A closed stdout becomes one that can't be written, as /dev/null that is open only for reading.
    Changes nothing for a stdout that a caller has put in place.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # gets the lowest free number
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrapped(sys.stdout)


def _wrapped(stdout: io.TextIOWrapper | None) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Output(1, "wb", closefd=False))
    if stdout is None:
        return io.TextIOWrapper(raw, "utf-8", "surrogateescape")
    is_prompt = stdout.line_buffering or stdout.write_through
    return io.TextIOWrapper(raw, stdout.encoding, stdout.errors, line_buffering=is_prompt)
