"""How the command fails: exit codes, and the exception that carries one with its line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What the command's exit status says."""

    OK = 0
    UNEXPECTED = 1  # a fault of ours, or of a library under us
    USAGE = 2  # a wrong option, an option out of its range, no prompt
    BROKEN_MODEL = 3  # no such path, or a file that cannot be read as a model
    UNSUPPORTED_MODEL = 4  # a model that FastTPS cannot patch
    DISAGREEMENT = 5  # `demo`: the patched and the unpatched answer differ
    NOT_INSTALLED = 6  # a package that the command needs is missing
    INTERRUPTED = 130  # Ctrl-C


class CliError(Exception):
    """An error that ends the command with one line and an exit code."""

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
