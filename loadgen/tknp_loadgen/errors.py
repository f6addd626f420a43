"""Errors that a user of `tknp-load` can do something about, and the exit codes of the command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a run's exit code says. `INTERRUPTED` is the shell's own code for Ctrl-C."""

    GOOD = 0
    FAILED = 1
    BAD_INPUT = 2
    SLO_MISSED = 3
    INVALID_RUN = 4
    TOO_MANY_ERRORS = 5
    INTERRUPTED = 130


class LoadError(Exception):
    """Root of every error that this package raises on purpose."""

    exit = Exit.FAILED


class InputError(LoadError, ValueError):
    """A value that can't be used: names field, value and remedy."""

    exit = Exit.BAD_INPUT

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class FileError(LoadError, ValueError):
    """A file that can't be used: names file, line (1-based; 0: the whole file) and reason."""

    exit = Exit.BAD_INPUT

    def __init__(self, path: object, line: int, reason: str) -> None:
        where = f"{path}:{line}" if line else str(path)
        super().__init__(f"{where}: {reason}")
        self.line = line
        self.reason = reason


class TargetError(LoadError):
    """No server could be reached, or it does not serve what is asked of it."""
