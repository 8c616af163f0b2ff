"""Standard streams of a command: closed streams, closed pipes, unencodable characters."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TextIO, TypeVar

from mlxstack.cli.exit_codes import PipeClosed

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

P = ParamSpec("P")
T = TypeVar("T")

_n_changes = 0
"""Changes under way, which a closed pipe does not end."""


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable, however the command was started."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The next file or socket would take the number, and the output of others.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _tolerant(sys.stdout)
    sys.stderr = _tolerant(sys.stderr)


@contextmanager
def changing() -> Iterator[None]:
    """Context of a change, which a closed pipe does not end."""
    global _n_changes  # noqa: PLW0603 - the streams are the process's
    _n_changes += 1
    try:
        yield
    finally:
        _n_changes -= 1


def finishes(*unless: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a verb that changes something, and ends with no pipe.

    With one of the options `unless` it is a verb like others.
    """

    def decorate(verb: Callable[P, T]) -> Callable[P, T]:
        @wraps(verb)
        def finished(*args: P.args, **kwargs: P.kwargs) -> T:
            if any(kwargs.get(option) for option in unless):
                return verb(*args, **kwargs)
            with changing():
                return verb(*args, **kwargs)

        return finished

    return decorate


class PipeWriter(io.FileIO):
    """Output to a pipe, which raises PipeClosed once it is closed."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write to the descriptor. Raises PipeClosed where nothing reads it any more.

        While a change goes on, the data is dropped instead.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            # Drop the buffer, so that the interpreter reports nothing at its exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if _n_changes:
                return memoryview(data).nbytes
            raise PipeClosed from None


def _tolerant(stream: TextIO) -> TextIO:
    """Escape unencodable characters; notice a closed pipe."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = PipeWriter(stream.fileno(), "wb", closefd=False)
    except OSError:
        stream.reconfigure(errors="backslashreplace")
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
    )
