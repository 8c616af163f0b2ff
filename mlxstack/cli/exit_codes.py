"""Exit codes of `mlx-stack`, and the errors that lead to them."""

import os
from enum import IntEnum

from mlxstack.core.errors import SetupError, StackError, Taken


class Misuse(Exception):
    """An invalid command line."""


class PipeClosed(BaseException):
    """A reader of the output that has gone.

    It passes through click and rich, which would make a failure of an Exception, and leaves the
    loop of asyncio as other errors do, which SystemExit does not.
    """


class Exit(IntEnum):
    """Exit codes.

    OK: done. FAILED: it was tried and went wrong. USAGE: the command line is invalid.
    NOT_RUNNING: there is no such service. TAKEN: the service or its port is already in use.
    SETUP: the preset or the machine cannot start it. HOPELESS: a worker that must not be
    restarted (EX_CONFIG of sysexits.h). INTERRUPTED: Ctrl-C; ended by SIGTERM it is 143.
    PIPE_CLOSED: the reader of the output has gone, as `head` does; 128 + SIGPIPE.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    TAKEN = 4
    SETUP = 5
    HOPELESS = os.EX_CONFIG
    INTERRUPTED = 130
    PIPE_CLOSED = 141


def failed_if(is_wrong: bool) -> Exit:
    """FAILED, else OK."""
    if is_wrong:
        return Exit.FAILED
    return Exit.OK


def exit_of(error: Misuse | StackError | ConnectionError) -> Exit:
    """Exit code of an error; a ConnectionError means that no service answers."""
    if isinstance(error, Misuse):
        return Exit.USAGE
    if isinstance(error, ConnectionError):
        return Exit.NOT_RUNNING
    if isinstance(error, SetupError):
        return Exit.SETUP
    if isinstance(error, Taken):
        return Exit.TAKEN
    return Exit.FAILED
